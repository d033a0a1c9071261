"""Keeps a placement group of one bundle for each claim: makes it, asks for its state, makes it again if Ray failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pollux.backends.ray.driver.connection import RayConnection
from pollux.backends.ray.driver.ray_errors import one_line
from pollux.backends.ray.driver_order import DriverOrder
from pollux.backends.ray.node_actor import found_gpus
from pollux.backends.ray.nodes import RayNode

__all__ = ["PlacementGroups"]

_PATIENCE_SECONDS = 5.0
_RETRY_SECONDS = 15.0
# Up to this many groups are asked for one by one: the answer for all groups contains every group that Ray ever had.
_MOST_SINGLE_QUESTIONS = 4


@dataclass(slots=True)
class _Group:
    """The placement group of a claim. `waits_since`: None once it was granted, or was reported to wait."""

    group: Any
    waits_since: float | None
    is_granted: bool = False


class PlacementGroups:
    """The groups of one service. `claims`: the name of the node by the name of the group. `nodes`: those in use."""

    def __init__(self, connection: RayConnection, order: DriverOrder, clock: Callable[[], float]) -> None:
        self._connection, self._order, self._clock = connection, order, clock
        self._util = connection.ray.util
        self.claims: dict[str, str] = dict(order.claims)
        self.nodes: Mapping[str, RayNode] = {}
        self._groups: dict[str, _Group] = {}
        self._failed_at: dict[str, float] = {}

    def recover(self) -> None:
        """Bring this service's groups in Ray in line with its claims."""
        for row in self._util.placement_group_table().values():
            name = row["name"]
            if not name.startswith(self._order.prefix) or row["state"] == "REMOVED":
                continue
            group = self._util.get_placement_group(name)
            if name in self.claims:
                self._follow(name, group)
            else:
                self._util.remove_placement_group(group)
        for name in self.claims:
            self._make(name)

    def take(self, claims: Mapping[str, str]) -> None:
        """Make a group for each of these claims."""
        for name, node in claims.items():
            self.claims[name] = node
            self._make(name)

    def free(self, names: Iterable[str]) -> None:
        """Remove the groups of these claims."""
        for name in names:
            self.claims.pop(name, None)
            self._failed_at.pop(name, None)
            self._remove(name)

    def retry(self, names: Iterable[str]) -> None:
        """Wait for these claims as if they were new: places were given back on their nodes."""
        for name in names:
            if name in self._groups:
                self._groups[name].waits_since = self._clock()

    def make_missing(self) -> None:
        """Make the groups of claims that have none: Ray failed to make one, or did not know the node yet."""
        late = self._clock() - _RETRY_SECONDS
        for name in self.claims.keys() - self._groups.keys():
            if self._failed_at.get(name, late) <= late:
                self._make(name)

    def pending(self) -> list[str]:
        """Claims on which Ray has not reported yet."""
        return [name for name, known in self._groups.items() if known.waits_since is not None]

    def not_granted(self) -> list[str]:
        """Claims that Ray has not granted, whether that was reported or not."""
        return [name for name, known in self._groups.items() if not known.is_granted]

    def check(self, names: Collection[str]) -> None:
        """Ask Ray which of these groups it has created, and report those that have waited for too long."""
        late = {name for name in names if self._is_late(self._groups[name])}
        # Where it matters which GPU it is, a task in the group reports that the group is there.
        asked = [name for name in names if name in late or not self._order.needs_gpu_numbers]
        created = self._created(asked)
        for name in asked:
            known = self._groups[name]
            if name not in created:
                if name in late:
                    known.waits_since = None
                    self._connection.tell("waits", claim=name)
            elif not self._order.needs_gpu_numbers:
                self._found([], None, name, known.group)

    def _is_late(self, known: _Group) -> bool:
        return known.waits_since is not None and known.waits_since < self._clock() - _PATIENCE_SECONDS

    def _created(self, names: list[str]) -> set[str]:
        """The groups among these that exist: one question for all of them, or one for each of a few."""
        table = self._util.placement_group_table
        if len(names) <= _MOST_SINGLE_QUESTIONS:
            return {name for name in names if table(self._groups[name].group).get("state") == "CREATED"}
        return {row["name"] for row in table().values() if row["state"] == "CREATED"} & set(names)

    def _make(self, name: str) -> None:
        node = self.nodes.get(self.claims[name])
        if node is None or name in self._groups:
            return
        group = self._connection.groups.placement_group(
            [self._order.bundle],
            name=name,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": node.ray_id}],
        )
        self._follow(name, group)

    def _follow(self, name: str, group: Any) -> None:
        """Wait for a group; where it matters which GPU it has, by a task that runs in it."""
        self._groups[name] = _Group(group, self._clock())
        if self._order.needs_gpu_numbers:
            inside = self._connection.strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            # `num_gpus` is given here and not where the task is declared, so that Ray can use its worker again.
            task = self._connection.ray.remote(found_gpus).options(num_cpus=0, num_gpus=1, scheduling_strategy=inside)
            self._connection.then(task.remote(), self._found, name, group)

    def _found(self, gpus: list[str] | None, error: Exception | None, name: str, group: Any) -> None:
        """Report a group that exists, with these GPUs, or that Ray failed to make."""
        known = self._groups.get(name)
        if known is None or known.group is not group:
            return
        if gpus is None:
            self._remove(name)
            # `make_missing` asks for it again, unless the service gives the claim back.
            self._failed_at[name] = self._clock()
            self._connection.tell("failed", claim=name, why=one_line(error))
            return
        known.waits_since, known.is_granted = None, True
        self._connection.tell("granted", claim=name, gpu=gpus[0] if gpus else None)

    def _remove(self, name: str) -> None:
        known = self._groups.pop(name, None)
        if known is not None:
            self._util.remove_placement_group(known.group)
