"""The driver's connection to Ray: its modules, calls whose results come as events, and reports to the service."""

from __future__ import annotations

import importlib
import queue
from collections.abc import Callable
from typing import Any

from pollux.backends.ray.driver_messages import DriverMessage

__all__ = ["RayConnection"]


class RayConnection:
    """`ray` is the module; `tell` sends a message to the service.

    `events` holds functions with their arguments for the driver's one thread to call.
    """

    def __init__(self, ray: Any, tell: Callable[[DriverMessage], None]) -> None:
        self.ray, self.tell = ray, tell
        self.events: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self.strategies = importlib.import_module("ray.util.scheduling_strategies")
        self.groups = importlib.import_module("ray.util.placement_group")

    def on_node(self, ray_id: str) -> Any:
        """The strategy that runs an actor or a task on that node only."""
        return self.strategies.NodeAffinitySchedulingStrategy(ray_id, soft=False)

    def then(self, ref: Any, handle: Callable[..., None], *given: Any) -> None:
        """Have the driver's thread call `handle(result, error, *given)` once a call to Ray has ended."""

        def done(future: Any) -> None:
            error = future.exception()
            self.events.put((handle, (None if error else future.result(), error, *given)))

        ref.future().add_done_callback(done)
