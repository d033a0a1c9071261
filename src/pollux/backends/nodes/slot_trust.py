"""GPUs of one machine on which jobs fail again and again, by the rules for nodes (`controller.state.node_trust`)."""

from __future__ import annotations

from collections.abc import Sequence

from pollux.backends.nodes.slot import Slot
from pollux.controller.state.node_trust import NodeTrust

__all__ = ["SlotTrust"]


class SlotTrust:
    """Counts how generations ended on each slot; a loss or crash counts only where one slot alone may be at fault."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = {str(slot): slot for slot in slots}
        self._trust = NodeTrust()

    def note_end(self, slots: Sequence[Slot], script: str, outcome: str) -> None:
        """Count an end (`protocol.Outcome`) for these slots, or against the only one."""
        if outcome == "succeeded":
            for slot in self._slots.keys() & set(map(str, slots)):
                self._trust.note_good(slot, script)
        elif outcome in ("crashed", "lost") and len(slots) == 1:
            self._trust.note_failure(str(slots[0]), script)

    @property
    def suspects(self) -> dict[Slot, str]:
        """The slots that may be at fault, each with the reason; never all."""
        return {self._slots[name]: why for name, why in self._trust.suspects(self._slots)}
