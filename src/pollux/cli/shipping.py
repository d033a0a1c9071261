"""A job's working folder sent to the service before the job, where the service is on another machine."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.core.errors import InvalidInput

if TYPE_CHECKING:
    from pollux.cli.client import Client
    from pollux.wire.job import JobRequest

__all__ = ["ship", "would_ship"]

_PIECE_BYTES = 512 * 1024


def ship(client: Client, request: JobRequest) -> JobRequest:
    """The job as it is on the service's machine: its folder sent there, once for the same files.

    Checkpoints inside the folder go to the service's own place, since the folder there may be that of several jobs.
    """
    from pollux.wire.package import digest_of, pack

    archive = pack(Path(request.workdir))
    return _there(request, _send(client, digest_of(archive), archive))


def would_ship(client: Client, request: JobRequest) -> tuple[JobRequest, str]:
    """The job as it would be there, and nothing is sent; where its files were not sent before, as it is, and that."""
    from pollux.wire.package import digest_of, pack

    archive = pack(Path(request.workdir))
    asked = {"digest": digest_of(archive), "size": len(archive), "offset": 0, "data": ""}
    folder = client.post("/v1/packages", asked)["folder"]
    if folder is not None:
        return _there(request, str(folder)), ""
    size = f"{len(archive) / 2**20:.1f} MiB" if len(archive) >= 2**20 else f"{len(archive) / 2**10:.1f} KiB"
    return request, (
        f"{request.name}: would send {request.workdir} ({size} packed), which the service does not have yet; "
        "the plan is known once it is there"
    )


def _there(request: JobRequest, folder: str) -> JobRequest:
    local, checkpoint = Path(request.workdir), request.checkpoint
    if checkpoint.dir is not None and Path(checkpoint.dir).is_relative_to(local):
        checkpoint = replace(checkpoint, dir=None)
    return replace(request, workdir=folder, checkpoint=checkpoint)


def _send(client: Client, digest: str, archive: bytes) -> str:
    size, have = len(archive), 0
    # Twice as many requests as pieces: others may send the same package, and the service says where to go on.
    for _ in range(2 * (size // _PIECE_BYTES + 2)):
        piece = base64.b64encode(archive[have : have + _PIECE_BYTES]).decode()
        answer = client.post("/v1/packages", {"digest": digest, "size": size, "offset": have, "data": piece})
        if answer["folder"] is not None:
            return str(answer["folder"])
        have = min(int(answer["have"]), size)
    raise InvalidInput("the service did not take the working folder as a whole: submit the job again")
