"""Which local batches fit into memory, by type of GPU; `step.oom` notices one that does not."""

from __future__ import annotations

__all__ = ["MemoryLimits"]


class MemoryLimits:
    """Largest local batch that ran, and smallest that did not, by GPU type.

    A state dict has the largest that ran as `held` and the smallest that did not as `burst`.
    """

    def __init__(self, gpu_type: str) -> None:
        self.gpu_type = gpu_type
        self._held: dict[str, int] = {}
        self._burst: dict[str, int] = {}

    @property
    def largest_run(self) -> int:
        """The largest local batch that a whole step ran with on this GPU type; 0 before the first."""
        return self._held.get(self.gpu_type, 0)

    @property
    def largest(self) -> int | None:
        """The largest local batch worth trying on this GPU type; None where nothing is known."""
        burst = self._burst.get(self.gpu_type)
        return None if burst is None else max(burst - 1, 1)

    def note_run(self, local_batch: int) -> None:
        """Note that a whole step ran with this local batch."""
        if local_batch > self.largest_run:
            self._held[self.gpu_type] = local_batch

    def note_out_of_memory(self, local_batch: int) -> int:
        """Note that this local batch was too large; returns the one to return to."""
        self._burst[self.gpu_type] = min(self._burst.get(self.gpu_type, local_batch), local_batch)
        fitting = self.largest_run if self.largest_run < local_batch else 0
        if fitting == 0:
            self._held.pop(self.gpu_type, None)
        return fitting or max(local_batch // 2, 1)

    def set_limit(self, largest: int) -> bool:
        """Never try more than `largest` again, since an earlier start died above it; returns whether that is new."""
        is_new = self.largest is None or self.largest > largest
        if is_new:
            self._burst[self.gpu_type] = largest + 1
        if self.largest_run > largest:
            self._held[self.gpu_type] = largest
        return is_new

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Plain values, by GPU type."""
        return {"held": dict(self._held), "burst": dict(self._burst)}

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        """Restore what an earlier run learned."""
        self._held = {str(key): int(value) for key, value in state["held"].items()}
        self._burst = {str(key): int(value) for key, value in state["burst"].items()}
