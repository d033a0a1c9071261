"""Makes the launch of a job's generation for a backend. Pure: the same record gives the same launch."""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.backends.protocol import Launch
from pollux.controller import JobRecord
from pollux.core import BatchMode, Placement
from pollux.core.errors import InvalidInput
from pollux.storage.address import is_address
from pollux.wire.home_layout import ca_file, checkpoint_folder
from pollux.wire.job import JobRequest

__all__ = ["LaunchContext", "environment", "folders_of", "launch_for", "request_of", "run_id", "store_of"]


def launch_for(
    record: JobRecord,
    generation: int,
    placement: Placement,
    variables: dict[str, str],
) -> Launch:
    """The launch of one generation; its variables are the user's, overridden by those of Pollux."""
    request = request_of(record)
    return Launch(
        job_id=record.spec.id,
        generation=generation,
        placement=placement,
        argv=request.run,
        workdir=request.workdir,
        env={**_trackers(variables), **request.env, **variables},
        grace_seconds=request.grace_seconds,
        memory_bytes_per_gpu=request.resources.memory_bytes,
        cpus_per_gpu=request.resources.cpus,
        live=request.allows_live,
    )


def run_id(record: JobRecord) -> str:
    """The id of a job's run in trackers: the same for all its generations, different for each job.

    At most 64 characters, the limit of Weights & Biases.
    """
    mark = hashlib.sha256(f"{record.spec.id}\0{record.submitted_at!r}".encode()).hexdigest()[:12]
    return f"{record.spec.id[:51]}-{mark}"


def _trackers(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for trackers; variables of the user override them."""
    return {"WANDB_RUN_ID": variables["POLLUX_RUN_ID"], "WANDB_RESUME": "allow"} if "POLLUX_RUN_ID" in variables else {}


def request_of(record: JobRecord) -> JobRequest:
    """The user's request; a job without one, as in simulations, cannot be launched."""
    if record.spec.request is None:
        raise InvalidInput(f"job '{record.spec.id}' has nothing to run; submit it with a job file")
    return record.spec.request


def folders_of(request: JobRequest, home: Path) -> tuple[str, ...]:
    """Folders that all nodes must share for the job: its working folder, and that of its checkpoints."""
    if store_of(request):
        return (request.workdir,)
    return (request.workdir, _checkpoint_folder(request, home / "checkpoints"))


def _checkpoint_folder(request: JobRequest, usual: Path) -> str:
    folder = request.checkpoint.dir
    return os.path.join(request.workdir, folder) if folder else str(usual)


def store_of(request: JobRequest) -> str | None:
    """The address of the object store for its checkpoints; None if they go to a folder."""
    checkpoints = request.checkpoint.dir
    return checkpoints if checkpoints and is_address(checkpoints) else None


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The common parts of all launches of a service.

    `url` is where agents report, None: nowhere. `ca` is the certificate that they trust there, as text, for replicas
    that may not see its file in `home`. `notice_seconds` is how long before the loss of a node its jobs are told;
    None if nodes are not taken back, or it is unknown.
    """

    home: Path
    batch: BatchMode
    url: str | None
    ca: str | None = None
    notice_seconds: float | None = None
    server_user: int | None = None


def environment(
    context: LaunchContext, record: JobRecord, generation: int, token: str, stopped_at: float | None = None
) -> dict[str, str]:
    """The `POLLUX_*` variables of a job's processes; see `pollux.wire.environment` for what they mean.

    Under a policy with fixed batches, jobs train in exact mode, even if they name a largest batch.
    """
    request, job_id = request_of(record), record.spec.id
    sizes = request.batch_size
    caps = [cap for cap in (sizes.per_gpu_max, record.local_batch_max) if cap is not None]
    values: dict[str, object | None] = {
        "POLLUX_JOB": job_id,
        "POLLUX_RUN_ID": run_id(record),
        "POLLUX_GENERATION": generation,
        "POLLUX_URL": context.url,
        "POLLUX_JOB_TOKEN": token if context.url else None,
        "POLLUX_SERVER_UID": context.server_user if context.url else None,
        **_certificate(context),
        "POLLUX_CHECKPOINT_DIR": store_of(request)
        or _checkpoint_folder(request, checkpoint_folder(context.home, job_id)),
        "POLLUX_CHECKPOINT_EVERY": request.checkpoint.every_seconds,
        "POLLUX_NOTICE_SECONDS": context.notice_seconds,
        "POLLUX_CHECKPOINT_KEEP": request.checkpoint.keep,
        "POLLUX_OUTPUT_DIR": context.home / "receipts" / job_id,
        "POLLUX_BATCH_SIZE": sizes.initial,
        "POLLUX_MAX_BATCH_SIZE": sizes.max,
        "POLLUX_ADAPT": "0" if context.batch == "fixed" else None,
        "POLLUX_MAX_LOCAL_BATCH": min(caps, default=None),
        "POLLUX_STOPPED_AT": stopped_at,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _certificate(context: LaunchContext) -> dict[str, object]:
    """The certificate of an encrypted service, as text or as the file in its home."""
    if context.url is None or not context.url.startswith("https:"):
        return {}
    return {"POLLUX_CA_FILE": ca_file(context.home)} if context.ca is None else {"POLLUX_CA": context.ca}
