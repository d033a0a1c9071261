"""The model as a script is given it: an object to keep, whichever replicas there are later.

With several replicas a script gets the wrapper of `replicas`. Alone there is none, and what it keeps must still come
to a wrapper once others join.
"""

from __future__ import annotations

import copyreg
import logging
import types
from collections.abc import Callable
from typing import Any, cast

from torch import nn

__all__ = ["stand_in"]

_log = logging.getLogger("pollux")


def stand_in(model: nn.Module, current: Callable[[], nn.Module]) -> nn.Module:
    """A second handle on `model`: of its class, with its very attributes; only a call goes to what `current` says.

    Where such a class cannot be made, the model itself.
    """
    kind = type(model)

    def call(self: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        return current()(*inputs, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # Copies and pickles are of the model: nobody else knows this class. As protocols below 2 do it, which is always
        # understood: pickle takes the newer way for objects of that very class only.
        make, arguments, *rest = cast("tuple[Any, ...]", model.__reduce_ex__(protocol))
        if make is vars(copyreg)["__newobj__"] and len(arguments) == 1:
            make, arguments = vars(copyreg)["_reconstructor"], (kind, object, None)
        return make, arguments, *rest

    def fill(namespace: dict[str, Any]) -> None:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        namespace.update({**names, "__call__": call, "__reduce_ex__": reduce})

    try:
        made: nn.Module = object.__new__(types.new_class(kind.__name__, (kind,), exec_body=fill))
        # One set of attributes for both: what is set, hooked or moved through one is so through the other.
        object.__setattr__(made, "__dict__", vars(model))
    except Exception as error:
        _log.debug("no stand-in for a model of %s: %s", kind.__name__, error)
        return model
    return made
