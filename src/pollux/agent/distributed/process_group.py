"""The process groups of the replicas of one job, the wrapped model, and small exchanges between replicas."""

from __future__ import annotations

import datetime
import gc
import hashlib
import inspect
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pollux.agent.distributed import abort, byte_collectives, connections, rendezvous
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.sync_batchnorm import set_counted, synchronise_batchnorm
from pollux.core.errors import InvalidInput

__all__ = ["ReplicaGroup", "WrappedModel", "is_loss"]

# All process groups of a job meet in its store, also those that the script makes.
rendezvous.install()

DEFAULT_TIMEOUT_SECONDS = 600.0
_log = logging.getLogger("pollux")
_UNFINISHED = "Expected to have finished reduction"
_NAMED = 5
_LOOK_SECONDS = 0.05
# Where the GPU has not finished its queue this long after a loss is known, a collective waits for a lost replica.
_IDLE_SECONDS = 2.0
_ALIKE_SECONDS = 60.0


def is_loss(error: BaseException) -> bool:
    """Whether an error says that other replicas or the store are lost; false for errors of the user's code."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in ("/gloo/", "Gloo", "NCCL"))


def _keep_other_users_out(before: frozenset[int]) -> None:
    """Cut other users' connections to the ports of a group just made; `before` are the ports from before it."""
    count = connections.cut_other_users(connections.listening_ports() - before)
    if count:
        _log.warning(
            "%d connections that another user of this machine made to this replica's ports were cut: where one had "
            "taken a replica's place, the group fails now and is made anew", count,
        )  # fmt: skip


def _data_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class WrappedModel(DistributedDataParallel):
    """PyTorch's data-parallel wrapper that also has the attributes of the model inside.

    `broken` is the error where replicas were lost in a forward pass, whose output is then of no use.
    """

    ran: bool = False
    broken: str = ""
    survives: bool = False
    successor: Callable[[], nn.Module] | None = None

    def forward_to(self, successor: Callable[[], nn.Module]) -> None:
        """Forward calls to the model that `successor` returns, for scripts that have kept this wrapper."""
        vars(self)["successor"] = successor

    def release_group(self) -> None:
        """Release the process group. It ends with its last reference, which frees replicas that wait in it."""
        for name in ("reducer", "logger", "process_group"):
            vars(self).pop(name, None)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward, and note that it ran, to notice a step that bypasses this wrapper."""
        if self.successor is not None:
            return self.successor()(*inputs, **kwargs)
        self.ran = True
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if self.survives and is_loss(error):
                self.broken = str(error)
            elif _UNFINISHED in str(error):
                raise InvalidInput(self._unused(str(error))) from error
            else:
                raise
        # The loop handles the lost replica in its backward pass; until then BatchNorm must not count samples.
        synchronise_batchnorm(self.module, None)
        set_counted(self.module, False)
        return self.module(*inputs, **kwargs)

    def _unused(self, said: str) -> str:
        """The error about parameters without a gradient; PyTorch gives their numbers."""
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        listed = re.search(r"did not receive grad for rank \d+:([ \d]+)", said)
        numbers = [int(number) for number in listed[1].split()] if listed is not None else []
        names = [trained[number] for number in numbers if number < len(trained)]
        few = f"{', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"
        which = f"{len(names)} of {len(trained)} parameters ({few})" if names else "some parameters"
        return (
            f"{which} had no part in the loss of the step before, so replicas waited for their gradients in vain: "
            'pass ddp_options={"find_unused_parameters": True} to pollux.init, or leave them out of the model'
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


class ReplicaGroup:
    """This process among `num_replicas`; a single replica opens no socket.

    With `meeting`, the store where groups meet, replicas may change while they run. There are two groups: the default
    one (NCCL on GPUs, else gloo) carries gradients; `control` (always gloo) carries small numbers without the GPU.
    `is_broken`: collectives on the GPU were aborted, so gradients are not averaged over the replicas.
    """

    def __init__(
        self,
        environment: Environment,
        device: torch.device,
        timeout: float | None = None,
        meeting: dist.Store | None = None,
    ) -> None:
        self.replica = environment.replica
        self.num_replicas = environment.num_replicas
        self.num_nodes = environment.num_nodes
        self.device = device
        self.store: dist.Store | None = None
        self.control: dist.ProcessGroup | None = None
        self.owns_group = False
        self._wrapped: WrappedModel | None = None
        self._others: list[dist.ProcessGroup] = []
        self.can_change = meeting is not None
        self._are_alike = False
        self._breaking = threading.Lock()
        self._is_intact: bool | None = None
        self.is_broken = False
        # Longer than the work of one replica alone, such as a save. The shim ends hanging replicas, not this limit.
        self._limit = datetime.timedelta(seconds=timeout or environment.timeout or DEFAULT_TIMEOUT_SECONDS)
        if dist.is_initialized():
            self.replica, self.num_replicas = dist.get_rank(), dist.get_world_size()
            self.num_nodes = min(self.num_nodes, self.num_replicas)
        if self.num_replicas > 1:
            self._join(meeting)

    def _rendezvous(self) -> dist.Store:
        store: dist.Store
        try:
            store, _, _ = next(
                dist.rendezvous("env://", rank=self.replica, world_size=self.num_replicas, timeout=self._limit)
            )
        except (ValueError, dist.DistError, RuntimeError) as error:
            raise InvalidInput(
                f"replica {self.replica} of {self.num_replicas} cannot meet the others: {error}; start the script "
                "with torchrun, or set MASTER_ADDR and MASTER_PORT"
            ) from error
        store.set_timeout(self._limit)
        return store

    def _join(self, meeting: dist.Store | None, patience: float | None = None) -> None:
        limit, before = self._limit, connections.listening_ports()
        if patience is not None and hasattr(dist.ProcessGroup, "set_timeout"):
            limit = min(limit, datetime.timedelta(seconds=patience))
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            store = self._rendezvous() if meeting is None else meeting
            if self.can_change and backend == "nccl":
                abort.keep_watchdog_out()
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("pollux/group", store),
                rank=self.replica,
                world_size=self.num_replicas,
                timeout=limit,
            )
            self.owns_group = True
        else:
            store = dist.distributed_c10d._get_default_store()
        # A process group may outlive a job: each job has keys of its own, with the same number on all replicas.
        number = store.add(f"pollux/jobs/{self.replica}", 1)
        self.store = dist.PrefixStore(f"pollux/job/{number}", store)
        self.control = dist.new_group(backend="gloo", timeout=limit)
        _keep_other_users_out(before)
        if limit < self._limit:
            groups: tuple[Any, ...] = (dist.group.WORLD, self.control)
            for group in groups:
                group.set_timeout(self._limit)

    def connect(
        self, replica: int, num_replicas: int, num_nodes: int, meeting: dist.Store | None, patience: float | None = None
    ) -> None:
        """After `disconnect`: become `replica` of `num_replicas`, which meet in `meeting` within `patience` seconds.

        A collective. The replicas must have equal models, or get them before they train.
        """
        self.replica, self.num_replicas, self.num_nodes = replica, num_replicas, num_nodes
        self._are_alike = True
        if num_replicas > 1:
            self._join(meeting, patience)

    def abort_collectives(self) -> bool:
        """Abort GPU collectives that wait for lost replicas, before `disconnect`; from any thread, once per group.

        False where a step was under way, whose result cannot be trusted. Without NCCL there is nothing to do:
        collectives end with an error by themselves, and no step follows one.
        """
        with self._breaking:
            if not (self.owns_group and dist.is_initialized() and dist.get_backend() == "nccl"):
                return True
            if self._is_intact is None:
                # `StepRunner` takes no step from here on.
                self.is_broken = True
                self._is_intact = abort.watchdog_is_out() and abort.is_idle(self.device, _IDLE_SECONDS)
                abort.abort(_data_group())
            return self._is_intact

    def disconnect(self) -> None:
        """Leave the groups made here; replicas that wait for this one in them get an error."""
        if self._wrapped is not None and self.owns_group:
            self._wrapped.release_group()
            self._wrapped = None
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._others.clear()
        self._is_intact, self.is_broken = None, False
        self.owns_group = False
        self.control = None
        self.store = None

    def another_control(self) -> dist.ProcessGroup | None:
        """A group like `control` for another thread: collectives of two threads on one group would mix.

        A collective; None for one replica.
        """
        if self.num_replicas == 1:
            return None
        before = connections.listening_ports()
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._limit)
        _keep_other_users_out(before)
        self._others.append(group)
        return group

    @property
    def is_first(self) -> bool:
        """Whether this is replica 0, which writes what is written once."""
        return self.replica == 0

    def wrap(self, model: nn.Module, options: Mapping[str, object] | None = None) -> nn.Module:
        """The model to call in training: with several replicas a wrapper that averages gradients, else the model."""
        if self.num_replicas == 1:
            return model
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        settings: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True, **(options or {})}
        if self._are_alike and "init_sync" in known:
            settings["init_sync"] = False
        self._wrapped = WrappedModel(model, **settings)
        self._wrapped.survives = self.can_change
        return self._wrapped

    def require_same(self, what: str, value: int) -> None:
        """Raise `InvalidInput` where replicas have different values."""
        table = self.gather([float(value)])
        if (table != table[0]).any():
            seen = ", ".join(f"{number:.0f}" for number in sorted(set(table[:, 0])))
            raise InvalidInput(
                f"replicas disagree on {what} ({seen}): start all of them with the same script and arguments"
            )

    def gather(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """The numbers of all replicas, a row for each; a collective."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self.num_replicas == 1:
            return mine.unsqueeze(0).numpy()
        parts = [torch.empty_like(mine) for _ in range(self.num_replicas)]
        dist.all_gather(parts, mine, group=self.control)
        return torch.stack(parts).numpy()

    def are_all_at(self, step: int, seconds: float) -> bool:
        """Whether all replicas call this at the same step, within that many seconds."""
        if self.num_replicas == 1:
            return True
        if self.store is None:
            # This replica has left its group.
            return False
        try:
            return self._all_come_to(self.store, f"all-at/{step}", seconds)
        except (dist.DistError, RuntimeError):
            return False

    def _all_come_to(self, store: dist.Store, key: str, seconds: float) -> bool:
        until = time.monotonic() + seconds
        store.add(key, 1)
        while store.add(key, 0) < self.num_replicas:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def require_alike(self, what: str, value: str, moment: str) -> None:
        """Raise `InvalidInput` where not all replicas come to that moment with the same value, within a minute.

        For what only some replicas may notice, since a collective would leave them waiting for the others.
        """
        digest = hashlib.blake2b(value.encode(), digest_size=8).hexdigest()
        if self.num_replicas == 1 or self.store is None:
            return
        if not self._all_come_to(self.store, f"{moment}/{digest}", _ALIKE_SECONDS):
            raise InvalidInput(
                f"{what} has changed on this replica, and not on all others in the same way: change it on all of them "
                "at the same step, and not by replica number or by what one of them has measured"
            )

    def joint_name(self, mine: str) -> str:
        """The different names of all replicas (such as their GPU types) as one name; a collective."""
        return " and ".join(sorted({name.decode() for name in self.gather_bytes(mine.encode())}))

    def add_up(self, values: Tensor) -> Tensor:
        """Sum a small host tensor over replicas, in place; a collective. Integers wrap around."""
        if self.num_replicas > 1:
            dist.all_reduce(values, group=self.control)
        return values

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """The sums over replicas of signed 64-bit integers, which wrap around; a collective."""
        sums: list[int] = self.add_up(torch.tensor(values, dtype=torch.int64)).tolist()
        return sums

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """The bytes of all replicas, by replica; a collective."""
        return byte_collectives.gather_bytes(content, self.num_replicas, self.control)

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average all gradients over replicas, for steps without the wrapper's averaging.

        A parameter that has a gradient on some replicas counts as zero on the others.
        """
        if self.num_replicas == 1:
            return
        there = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int64)
        self.add_up(there)
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter, count in zip(parameters, there.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                by_type.setdefault(parameter.grad.dtype, []).append(parameter)
        for group in by_type.values():
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in group if parameter.grad is not None])
            flat.div_(self.num_replicas)
            dist.all_reduce(flat)
            pieces = flat.split([parameter.numel() for parameter in group])
            for parameter, piece in zip(group, pieces, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(piece.view_as(parameter.grad))

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy replica 0's buffers to all: without synchronised BatchNorm, running averages differ."""
        if self.num_replicas > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def close(self) -> None:
        """Release the wrapper, whose threads may crash a process that exits, then leave the groups made here."""
        if not self.owns_group and self.control is not None and dist.is_initialized():
            for group in (self.control, *self._others):
                dist.destroy_process_group(group)
        if self._wrapped is not None and self.owns_group:
            self._wrapped.release_group()
            gc.collect()
        self.disconnect()
