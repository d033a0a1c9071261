"""The model that a script gets from a job: it stays valid when the replicas change.

With several replicas a script gets the wrapper of `process_group`. With one replica there is no wrapper, and calls of
the model that the script keeps must reach the wrapper that is made when other replicas join.
"""

from __future__ import annotations

import copy
import logging
import operator
import types
from collections.abc import Callable
from typing import Any, cast

from torch import nn

__all__ = ["stable_handle"]

_log = logging.getLogger("pollux")


def stable_handle(model: nn.Module, current: Callable[[], nn.Module]) -> nn.Module:
    """A second object of the class of `model` that shares its attributes; only calls go to the model of `current`.

    Copying or pickling it copies or pickles the model, and its class makes ordinary objects. Where such an object
    cannot be made, or the class of the model would notice it, this returns the model itself.
    """
    kind = type(model)
    if type(kind) is not type or any("__init_subclass__" in vars(base) for base in kind.__mro__[:-1]):
        return model
    handles: list[nn.Module] = []

    def is_handle(it: nn.Module) -> bool:
        return it is handles[0]

    names = {**_calls_and_attributes(model, current, is_handle), **_copying(model, is_handle)}
    try:
        made: nn.Module = object.__new__(
            types.new_class(kind.__name__, (kind,), exec_body=lambda into: into.update(names))
        )
        handles.append(made)
        # Both share one set of attributes: what one sets, hooks or moves shows in the other.
        object.__setattr__(made, "__dict__", vars(model))
    except Exception as error:
        _log.debug("no second handle on a model of %s: %s", kind.__name__, error)
        return model
    return made


def _calls_and_attributes(
    model: nn.Module, current: Callable[[], nn.Module], is_handle: Callable[[nn.Module], bool]
) -> dict[str, Any]:
    """How the class of a handle treats calls and attributes; all its objects but the handle are ordinary."""
    kind = type(model)
    of_object = vars(object)["__class__"]

    def call(self: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        return current()(*inputs, **kwargs) if is_handle(self) else kind.__call__(self, *inputs, **kwargs)

    def get_class(self: nn.Module) -> type[nn.Module]:
        return type(model) if is_handle(self) else kind

    def set_class(self: nn.Module, value: type[nn.Module]) -> None:
        of_object.__set__(model if is_handle(self) else self, value)

    def attribute(self: nn.Module, name: str) -> Any:
        try:
            return kind.__getattr__(self, name)
        except AttributeError:
            # The model may have got another class meanwhile, with more attributes.
            if not is_handle(self) or type(model) is kind:
                raise
            return getattr(model, name)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return {"__call__": call, "__getattr__": attribute, "__class__": property(get_class, set_class), **names}


def _copying(model: nn.Module, is_handle: Callable[[nn.Module], bool]) -> dict[str, Any]:
    """How objects of the class of a handle are copied and pickled: the handle as the model, others as usual."""
    kind = type(model)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        if is_handle(self):
            # References to the model inside it, such as a hook's, then refer to the same copy.
            return operator.getitem, ([model], 0)
        make, arguments, *rest = cast("tuple[Any, ...]", kind.__reduce_ex__(self, protocol))
        return make, tuple(kind if each is type(self) else each for each in arguments), *rest

    def deep(self: nn.Module, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(model, memo) if is_handle(self) else cast(Any, kind).__deepcopy__(self, memo)

    def shallow(self: nn.Module) -> Any:
        return copy.copy(model) if is_handle(self) else cast(Any, kind).__copy__(self)

    own = {"__deepcopy__": deep, "__copy__": shallow}
    return {"__reduce_ex__": reduce, **{name: copier for name, copier in own.items() if hasattr(kind, name)}}
