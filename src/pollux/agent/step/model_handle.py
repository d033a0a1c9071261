"""The model as a script is given it: an object to keep, whichever replicas there are later.

With several replicas a script gets the wrapper of `process_group`. Alone there is none, and what it keeps must still
come to a wrapper once others join.
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
    """A second handle on `model`: of its class, with its very attributes; only a call goes to what `current` says.

    Copies and pickles of it are the model's own, as is what is made from its class. Where such a class cannot be made,
    or would be noticed by the model's own, the model itself.
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
        # One set of attributes for both: what is set, hooked or moved through one is so through the other.
        object.__setattr__(made, "__dict__", vars(model))
    except Exception as error:
        _log.debug("no stand-in for a model of %s: %s", kind.__name__, error)
        return model
    return made


def _calls_and_attributes(
    model: nn.Module, current: Callable[[], nn.Module], is_handle: Callable[[nn.Module], bool]
) -> dict[str, Any]:
    """What the class of a handle does with calls and attributes; all but the handle are ordinary objects of it."""
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
            # A model may have been given another class meanwhile, with more in it.
            if not is_handle(self) or type(model) is kind:
                raise
            return getattr(model, name)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return {"__call__": call, "__getattr__": attribute, "__class__": property(get_class, set_class), **names}


def _copying(model: nn.Module, is_handle: Callable[[nn.Module], bool]) -> dict[str, Any]:
    """How objects of the class of a handle are copied and pickled: the handle as the model, others as ever."""
    kind = type(model)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        if is_handle(self):
            # Whatever refers to the model within it, a hook say, refers to the same copy.
            return operator.getitem, ([model], 0)
        make, arguments, *rest = cast("tuple[Any, ...]", kind.__reduce_ex__(self, protocol))
        return make, tuple(kind if each is type(self) else each for each in arguments), *rest

    def deep(self: nn.Module, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(model, memo) if is_handle(self) else cast(Any, kind).__deepcopy__(self, memo)

    def shallow(self: nn.Module) -> Any:
        return copy.copy(model) if is_handle(self) else cast(Any, kind).__copy__(self)

    own = {"__deepcopy__": deep, "__copy__": shallow}
    return {"__reduce_ex__": reduce, **{name: copier for name, copier in own.items() if hasattr(kind, name)}}
