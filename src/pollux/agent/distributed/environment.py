"""Reads the environment variables of this process: those of torchrun, with their usual meaning, and those of Pollux.

Imports no PyTorch: `device` chooses the device, `process_group` makes the process group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.core.errors import InvalidInput
from pollux.storage.address import is_address
from pollux.wire.live.store_channel import JOIN_VARIABLE, STORE_VARIABLE

__all__ = ["Environment", "read_environment"]


@dataclass(frozen=True, slots=True)
class Environment:
    """Which replica this is: `replica` of `num_replicas`, number `local_replica` on its node, over `num_nodes`.

    The other fields are the `POLLUX_*` variables, see `pollux.wire.environment`; None or empty where not set.
    """

    replica: int = 0
    num_replicas: int = 1
    local_replica: int = 0
    num_nodes: int = 1
    job: str = ""
    checkpoint_dir: str | Path | None = None
    checkpoint_every: float | None = None
    notice: float | None = None
    output_dir: Path | None = None
    timeout: float | None = None
    generation: int = 0
    url: str = ""
    job_token: str = ""
    ca_file: Path | None = None
    ca: str = ""
    server_user: int | None = None
    keep_checkpoints: int | None = None
    batch_size: int | None = None
    max_batch_size: int | None = None
    max_local_batch: int | None = None
    adapts: bool = True
    stopped_at: float | None = None
    store: str = ""
    joins: bool = False
    run_id: str = ""

    def batches(
        self, initial: int | None, maximum: int | None, local: int | None
    ) -> tuple[int | None, int | None, int | None]:
        """The initial batch, the largest batch, and the largest local batch, each None where not limited.

        The script's values override the launcher's; of two local limits the smaller one counts. Where the launcher
        wants a fixed batch, the largest batch is None, which means exact mode.
        """
        ceiling = (maximum or self.max_batch_size) if self.adapts else None
        caps = [cap for cap in (local, self.max_local_batch) if cap is not None]
        return initial or self.batch_size, ceiling, min(caps, default=None)


def _whole(variables: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = variables.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InvalidInput(f"{name} is '{text}': give a whole number, {least} or more, or unset it")
    return value


def _count(variables: Mapping[str, str], name: str) -> int | None:
    return _whole(variables, name, 0, 1) or None


def _seconds(variables: Mapping[str, str], name: str, or_zero: bool = False) -> float | None:
    """A number of seconds above 0, or 0 where `or_zero`; None where the variable is not set."""
    text = variables.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0.0 < value < float("inf") or (or_zero and value == 0.0)):
        least = ", 0 or more" if or_zero else " above 0"
        raise InvalidInput(f"{name} is '{text}': give a number of seconds{least}, or unset it")
    return value


def _path(variables: Mapping[str, str], name: str) -> Path | None:
    return Path(variables[name]) if variables.get(name) else None


def _location(variables: Mapping[str, str], name: str) -> str | Path | None:
    """A folder, or the address of an object store as text, which a `Path` would change."""
    text = variables.get(name, "")
    return text if is_address(text) else _path(variables, name)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` and `POLLUX_*`.

    Without these variables the process is the only replica, on one node.
    """
    variables = os.environ if variables is None else variables
    num_replicas = _whole(variables, "WORLD_SIZE", 1, 1)
    if num_replicas > 1 and not variables.get("RANK"):
        raise InvalidInput(
            f"WORLD_SIZE is {num_replicas} but RANK is not set: start the script with torchrun, or set both"
        )
    replica = _whole(variables, "RANK", 0, 0)
    if replica >= num_replicas:
        raise InvalidInput(f"RANK is {replica} with WORLD_SIZE {num_replicas}: ranks run from 0 to WORLD_SIZE - 1")
    local_replicas = _whole(variables, "LOCAL_WORLD_SIZE", num_replicas, 1)
    num_nodes = _whole(variables, "POLLUX_NUM_NODES", max(1, -(-num_replicas // local_replicas)), 1)
    return Environment(
        replica=replica,
        num_replicas=num_replicas,
        local_replica=_whole(variables, "LOCAL_RANK", replica % local_replicas, 0),
        num_nodes=min(num_nodes, num_replicas),
        job=variables.get("POLLUX_JOB", ""),
        checkpoint_dir=_location(variables, "POLLUX_CHECKPOINT_DIR"),
        checkpoint_every=_seconds(variables, "POLLUX_CHECKPOINT_EVERY"),
        notice=_seconds(variables, "POLLUX_NOTICE_SECONDS", or_zero=True),
        output_dir=_path(variables, "POLLUX_OUTPUT_DIR"),
        timeout=_seconds(variables, "POLLUX_TIMEOUT"),
        generation=_whole(variables, "POLLUX_GENERATION", 0, 0),
        url=variables.get("POLLUX_URL", ""),
        job_token=variables.get("POLLUX_JOB_TOKEN", ""),
        ca_file=_path(variables, "POLLUX_CA_FILE"),
        ca=variables.get("POLLUX_CA", ""),
        server_user=_whole(variables, "POLLUX_SERVER_UID", 0, 0) or None,
        keep_checkpoints=_count(variables, "POLLUX_CHECKPOINT_KEEP"),
        batch_size=_count(variables, "POLLUX_BATCH_SIZE"),
        max_batch_size=_count(variables, "POLLUX_MAX_BATCH_SIZE"),
        max_local_batch=_count(variables, "POLLUX_MAX_LOCAL_BATCH"),
        adapts=variables.get("POLLUX_ADAPT", "") != "0",
        stopped_at=_seconds(variables, "POLLUX_STOPPED_AT"),
        store=variables.get(STORE_VARIABLE, ""),
        joins=variables.get(JOIN_VARIABLE, "") == "1",
        run_id=variables.get("POLLUX_RUN_ID", ""),
    )
