"""Lets process groups that meet by `env://`, those of a script or of Lightning, meet in the job's store.

The store refuses PyTorch's own client from another machine, since that client cannot prove that it knows the secret.
"""

from __future__ import annotations

import importlib
import os
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from pollux.agent.distributed.authenticated_store import AuthenticatedStore
from pollux.core.errors import InvalidInput
from pollux.wire.live.store_channel import SECRET_VARIABLE, StoreAccess

__all__ = ["install", "store_access"]

_Meeting = tuple[dist.Store, int, int]


def store_access() -> StoreAccess | None:
    """The address and secret of the job's store, from the launcher of this process; None where there is none."""
    try:
        return StoreAccess.read(os.environ)
    except ValueError:
        raise InvalidInput(
            f"{SECRET_VARIABLE} is not as the launcher sets it, host:port and a secret: unset it, or leave it alone"
        ) from None


def _meets_there(access: StoreAccess | None) -> bool:
    """Whether `env://` means the job's store; torchrun inside a job, for example, has a store of its own."""
    return access is not None and access.address == f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _through_the_store(usual: Callable[..., Iterator[_Meeting]]) -> Callable[..., Iterator[_Meeting]]:
    def meet(url: str, **options: Any) -> Iterator[_Meeting]:
        access = store_access()
        asked = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
        rank, size = (asked.get(name.lower(), os.environ.get(name)) for name in ("RANK", "WORLD_SIZE"))
        if access is None or not _meets_there(access) or rank is None or size is None:
            yield from usual(url, **options)
            return
        timeout = options.get("timeout", default_pg_timeout)
        yield AuthenticatedStore(access, timeout.total_seconds()), int(rank), int(size)
        raise RuntimeError("replicas cannot meet a second time by env://")

    vars(meet)["of_pollux"] = True
    return meet


def install() -> None:
    """Install this rendezvous for `env://` in this process; a second call changes nothing."""
    # In the package a function of the same name hides the module.
    handlers = getattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    usual = handlers.get("env")
    if usual is not None and not hasattr(usual, "of_pollux"):
        handlers["env"] = _through_the_store(usual)
