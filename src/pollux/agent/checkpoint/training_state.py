"""Reads and writes the state of a job: model, optimiser, scheduler, random states, the user's own objects.

Checkpoints hold it, a roll-back returns to a copy of it, and joining replicas receive it. `checkpointer` writes files.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from pollux.agent.checkpoint.reader import Saved, parameter_signature, tensor_layout
from pollux.agent.checkpoint.state import State
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.core.errors import CheckpointMismatch, InvalidInput

__all__ = ["Stateful", "TrainingState", "mixed_seed", "read_rng", "require_stateful", "write_rng"]

_log = logging.getLogger("pollux")

_MODEL = "model."
_OPTIMIZER = "optimizer.state."
# The name that `nn.Module.state_dict` gives to what `get_extra_state` returns.
_EXTRA = "_extra_state"


@runtime_checkable
class Stateful(Protocol):
    """An object of the user's that can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore a state."""
        ...


def mixed_seed(*parts: int) -> int:
    """One seed of 63 bits from several numbers, such as (seed, step, replica)."""
    text = ",".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def read_rng(device: torch.device) -> str:
    """This process's random states (Python, numpy, PyTorch and its GPU) as text."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return json.dumps(states)


def write_rng(text: str, device: torch.device) -> None:
    """Set this process's random states as `read_rng` gave them."""
    states = json.loads(text)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


class TrainingState:
    """Model, optimiser, scheduler, scaler, random states and the user's objects of one job.

    Parameters have their names in the model, so that a checkpoint fits any number of replicas and loads without Pollux.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stateful: Mapping[str, Stateful],
        replicas: ReplicaGroup,
        seed: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._stateful = dict(stateful)
        self._replicas = replicas
        self._seed = seed
        self._names = self._names_by_identity()
        self._num_groups = len(optimizer.param_groups)
        self._trained_at_start = self._trained_now()

    def _names_by_identity(self) -> dict[int, str]:
        names = {id(parameter): _clean(name) for name, parameter in self._model.named_parameters()}
        for index, group in enumerate(self._optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"group{index}.{number}")
        return names

    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model by name, not copied."""
        state = self._model.state_dict()
        return {f"{_MODEL}{_clean(name)}": value for name, value in state.items() if _in_memory(name, value)}

    def model_objects(self) -> dict[str, object]:
        """The rest of the model's state by name: extra state of modules, and what hooks of the model add.

        Extra state belongs here even where it is a tensor: a module makes it on request and takes it back whole.
        """
        state = self._model.state_dict()
        return {f"{_MODEL}{_clean(name)}": value for name, value in state.items() if not _in_memory(name, value)}

    def unsaved_buffers(self) -> dict[str, Tensor | None]:
        """Buffers that the model's state lacks (`persistent=False`), by name; None where one is registered but not set.

        Checkpoints leave them out, as plain PyTorch does, but all replicas must hold the same ones.
        """
        saved = {_clean(name) for name in self._model.state_dict()}
        return {name: module._buffers[key] for name, (module, key) in self._places().items() if name not in saved}

    def _places(self) -> dict[str, tuple[nn.Module, str]]:
        """The module and the key of every buffer, by its name."""
        modules = self._model.named_modules(remove_duplicate=False)
        return {
            _clean(f"{prefix}.{key}" if prefix else key): (module, key)
            for prefix, module in modules
            for key in module._buffers
        }

    def set_buffers(self, buffers: Mapping[str, Tensor | None]) -> None:
        """Set the buffers to the `unsaved_buffers` of another replica, whose shapes may differ from those here."""
        places = self._places()
        modules = {_clean(name): module for name, module in self._model.named_modules(remove_duplicate=False)}
        for name in buffers:
            if name not in places and name.rpartition(".")[0] not in modules:
                raise CheckpointMismatch(
                    f"the other replicas have a buffer '{name}', and this one has no such module: build all of the "
                    "model before pollux.init, so that every replica has the same modules"
                )
        with torch.no_grad():
            for name, value in buffers.items():
                prefix, _, last = name.rpartition(".")
                module, key = places[name] if name in places else (modules[prefix], last)
                _set_buffer(module, key, value)

    def parameter_names(self) -> frozenset[str]:
        """`model.NAME` of every trainable parameter: these must stay finite; a buffer may be a mask of −inf."""
        named = self._model.named_parameters(remove_duplicate=False)
        return frozenset(f"{_MODEL}{_clean(name)}" for name, parameter in named if parameter.requires_grad)

    def signature(self) -> dict[str, Any]:
        """What must be equal in checkpoint and job: names, shapes and types of tensors, and the kind of optimiser."""
        shapes = parameter_signature({name.removeprefix(_MODEL): each for name, each in self.model_tensors().items()})
        extra = {name.removeprefix(_MODEL): "kept" for name in self.model_objects() if _is_extra(name)}
        known: dict[str, Any] = {"optimizer": type(self._optimizer).__name__, **shapes}
        return {**known, "object": extra} if extra else known

    def _optimizer_entries(self) -> Iterator[tuple[str, str, object]]:
        for parameter, entries in self._optimizer.state.items():
            for key, value in entries.items():
                yield self._names[id(parameter)], key, value

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of model and optimiser by name, not copied."""
        optimizer = {
            f"{_OPTIMIZER}{name}.{key}": value
            for name, key, value in self._optimizer_entries()
            if isinstance(value, Tensor)
        }
        return {**self.model_tensors(), **optimizer}

    def user_objects(self) -> dict[str, object]:
        """The states of the user's objects, the scheduler and the scaler, by their names in a checkpoint."""
        return {f"object.{name}": item.state_dict() for name, item in self._stateful.items()}

    def rng_texts(self) -> list[str]:
        """The random states of all replicas, by replica; a collective."""
        texts = self._replicas.gather_bytes(read_rng(self._replicas.device).encode())
        return [text.decode() for text in texts]

    def own(self, rng_texts: Sequence[str]) -> State:
        """This replica's state with the given random states; where there are none, restoring it draws new ones."""
        # The script may have added parameters.
        self._names = self._names_by_identity()
        state = State(self.tensors())
        others: dict[str, dict[str, Any]] = {}
        for name, key, value in self._optimizer_entries():
            if not isinstance(value, Tensor):
                others.setdefault(name, {})[key] = value
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        state.objects.update(self.model_objects())
        state.objects["optimizer.groups"] = groups
        state.objects["optimizer.others"] = others
        state.objects.update(self.user_objects())
        state.values["rng"] = list(rng_texts)
        state.values["lr_scheduler"] = self._schedule_kind()
        # What the script changed on the way. What it sets before `init` is its own to say, at each start.
        before, now = self._trained_at_start, self._trained_now()
        state.values["trained"] = {name: trained for name, trained in now.items() if before.get(name) != trained}
        added = self._optimizer.param_groups[self._num_groups :]
        names = {id(each): _clean(name) for name, each in self._model.named_parameters()}
        state.values["added_groups"] = [[names.get(id(each), "") for each in group["params"]] for group in added]
        return state

    def _trained_now(self) -> dict[str, bool]:
        return {_clean(name): each.requires_grad for name, each in self._model.named_parameters()}

    def _freeze_as(self, trained: object) -> None:
        """Freeze and unfreeze parameters as the script had done, for instance in an earlier epoch."""
        if isinstance(trained, dict):
            for name, parameter in self._model.named_parameters():
                before = self._trained_at_start.get(_clean(name), parameter.requires_grad)
                parameter.requires_grad_(bool(trained.get(_clean(name), before)))

    def check_schedule(self, values: Mapping[str, Any]) -> None:
        """Refuse a state with a scheduler of another kind, which would otherwise load its numbers without an error."""
        here, there = self._schedule_kind(), values.get("lr_scheduler")
        if here is not None and there is not None and here != there:
            raise CheckpointMismatch(
                f"the checkpoint's lr_scheduler is a {there}, this one is a {here}: build it as it was, or use another "
                "checkpoint folder"
            )

    def _schedule_kind(self) -> str | None:
        schedule = self._stateful.get("lr_scheduler")
        return None if schedule is None else _kind(schedule)

    def _add_groups(self, added: object) -> None:
        """Add the parameter groups that the script added in an earlier epoch; their settings are restored later."""
        missing = list(added) if isinstance(added, list) else []
        missing = missing[len(self._optimizer.param_groups) - self._num_groups :]
        parameters = {_clean(name): each for name, each in self._model.named_parameters()}
        for names in missing:
            if all(name in parameters for name in names):
                self._optimizer.add_param_group({"params": [parameters[name] for name in names]})

    def copied(self, state: State) -> State:
        """A copy of a state, with its tensors on the host."""

        def on_host(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", copy=True)

        tensors = {name: on_host(tensor) for name, tensor in state.tensors.items()}
        return State(tensors, copy.deepcopy(state.objects), copy.deepcopy(state.values))

    def templates(self, saved: Saved) -> dict[str, Tensor]:
        """The tensors to read a checkpoint into: the model's own, and sharded ones for the optimiser's state.

        The reader makes new tensors for the state of an optimiser that is not sharded.
        """
        tensors = self.model_tensors()
        parameters = {self._names[id(parameter)]: parameter for parameter in self._model.parameters()}
        for name, (shape, dtype) in tensor_layout(saved).items():
            if not name.startswith(_OPTIMIZER):
                continue
            parameter = parameters.get(name.removeprefix(_OPTIMIZER).rpartition(".")[0])
            if parameter is not None and hasattr(parameter, "device_mesh") and parameter.shape == shape:
                tensors[name] = torch.zeros_like(parameter.detach(), dtype=dtype)
        return tensors

    def restore(self, state: State, *, tensors_in_place: bool = False) -> None:
        """Restore a state; `tensors_in_place`: the model's tensors have its values already."""
        if not tensors_in_place:
            with torch.no_grad():
                for name, tensor in self.model_tensors().items():
                    # A tensor that was received in place needs no copy.
                    if tensor.data_ptr() != state.tensors[name].data_ptr():
                        tensor.copy_(state.tensors[name])
        self._freeze_as(state.values.get("trained"))
        self._add_groups(state.values.get("added_groups"))
        self._restore_model_objects(state)
        self._restore_optimizer(state)
        for name, item in self._stateful.items():
            key = f"object.{name}"
            if key not in state.objects and name.startswith("script."):
                _log.warning("the checkpoint has no state of a scheduler that the script steps: it starts afresh")
                continue
            if key not in state.objects:
                raise CheckpointMismatch(
                    f"the checkpoint has no state for '{name}': it was written without that object"
                )
            item.load_state_dict(state.objects[key])  # type: ignore[arg-type]
        unused = sorted(
            key.removeprefix("object.")
            for key in state.objects
            if key.startswith("object.") and key.removeprefix("object.") not in self._stateful
        )
        if unused:
            _log.warning(
                "the checkpoint holds the state of %s, which is not given now: the next save leaves it out; pass it in "
                "state= to keep it",
                ", ".join(f"'{name}'" for name in unused),
            )

    def _restore_model_objects(self, state: State) -> None:
        """Restore the extra state of modules through `load_state_dict`, which leaves the tensors as they are."""
        objects = {name.removeprefix(_MODEL): value for name, value in state.objects.items() if name.startswith(_MODEL)}
        if objects:
            whole = self._model.state_dict()
            own_names = {_clean(name): name for name in whole}
            whole.update({own_names.get(name, name): value for name, value in objects.items()})
            self._model.load_state_dict(whole, strict=False)

    def _restore_optimizer(self, state: State) -> None:
        groups = state.objects["optimizer.groups"]
        others = state.objects["optimizer.others"]
        assert isinstance(groups, list)
        assert isinstance(others, dict)
        if len(groups) != len(self._optimizer.param_groups):
            raise CheckpointMismatch(
                f"the checkpoint's optimiser has {len(groups)} parameter groups, this one has "
                f"{len(self._optimizer.param_groups)}: build it as it was, or use another checkpoint folder"
            )
        entries: dict[str, dict[str, Any]] = {name: dict(values) for name, values in others.items()}
        for name, tensor in state.tensors.items():
            if name.startswith(_OPTIMIZER):
                parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition(".")
                entries.setdefault(parameter, {})[key] = tensor
        numbers = itertools.count()
        saved_groups, by_number = [], {}
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            members = []
            for parameter in group["params"]:
                number = next(numbers)
                members.append(number)
                if self._names[id(parameter)] in entries:
                    by_number[number] = entries[self._names[id(parameter)]]
            saved_groups.append({**saved, "params": members})
        self._optimizer.load_state_dict({"state": by_number, "param_groups": saved_groups})

    def restore_rng(self, values: Mapping[str, Any], step: int) -> None:
        """Restore this replica's random state; at another number of replicas draw one from (seed, step, replica)."""
        texts = values["rng"]
        if len(texts) == self._replicas.num_replicas:
            write_rng(texts[self._replicas.replica], self._replicas.device)
        else:
            self.seed_rng(step)

    def seed_rng(self, step: int) -> None:
        """Seed the random states from (seed, step, replica), so that replicas differ and a run can be repeated."""
        seed = mixed_seed(self._seed, step, self._replicas.replica)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def require_stateful(objects: Mapping[str, object]) -> dict[str, Stateful]:
    """The user's objects; `InvalidInput` where one lacks `state_dict` or `load_state_dict`."""
    for name, item in objects.items():
        missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(item, method, None))]
        if missing:
            raise InvalidInput(
                f"state['{name}'] is a {type(item).__name__} without {' and '.join(missing)}: give it both methods, or "
                "leave it out"
            )
    return {name: item for name, item in objects.items() if isinstance(item, Stateful)}


def _kind(schedule: object) -> str:
    """The name of a scheduler's class, with those of the schedulers inside it."""
    inner = getattr(schedule, "_schedulers", ())
    names = ", ".join(_kind(each) for each in inner)
    return f"{type(schedule).__name__}({names})" if names else type(schedule).__name__


def _set_buffer(module: nn.Module, key: str, value: Tensor | None) -> None:
    """Copy into the buffer if shape and type fit, since other tensors may share its memory; else replace the buffer."""
    here = module._buffers.get(key)
    if value is not None and here is not None:
        value = value.to(here.device)
        if (here.shape, here.dtype) == (value.shape, value.dtype) and here.is_contiguous():
            here.copy_(value)
            return
    if key in module._buffers:
        module._buffers[key] = value
    else:
        module.register_buffer(key, value, persistent=False)


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _in_memory(name: str, value: object) -> bool:
    """Whether an entry of a model's state is a tensor of the model, and not extra state that was made on request."""
    return isinstance(value, Tensor) and not _is_extra(name)


def _clean(name: str) -> str:
    """The name without the prefix that a compiled model adds."""
    return name.replace("_orig_mod.", "")
