"""Sends a job's working folder to a service on another machine, before the job."""

from __future__ import annotations

import base64
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.core.errors import InvalidInput, TooLarge

if TYPE_CHECKING:
    from pollux.cli.client.client import Client
    from pollux.wire.job import JobRequest

__all__ = ["ship", "would_ship"]

_PIECE_BYTES = 512 * 1024


def ship(client: Client, request: JobRequest, is_asked_for: bool = True) -> tuple[JobRequest, str]:
    """Send the folder, unless the service has the same files; returns the job with the folder there, and a message.

    A checkpoint folder inside it is left out, since several jobs may share the folder there. Unless `is_asked_for`, a
    home folder is not sent.
    """
    from pollux.storage.archive import digest_of

    archive = _packed(request, is_asked_for)
    folder, was_there = _send(client, digest_of(archive), archive)
    done = f"sent before to {client.url}" if was_there else f"sent ({_size(archive)} packed) to {client.url}"
    return _with_folder_on_service(request, folder), f"{_named(request, is_asked_for)}: {done}, as {folder}"


def would_ship(client: Client, request: JobRequest, is_asked_for: bool = True) -> tuple[JobRequest, str]:
    """The job with its folder on the service; the same job and a message if the service does not have the files."""
    from pollux.storage.archive import digest_of

    archive = _packed(request, is_asked_for)
    asked = {"digest": digest_of(archive), "size": len(archive), "offset": 0, "data": ""}
    folder = client.post("/v1/packages", asked)["folder"]
    if folder is not None:
        return _with_folder_on_service(request, str(folder)), ""
    return request, (
        f"{request.name}: would send {request.workdir} ({_size(archive)} packed), which the service does not have yet; "
        "it can plan the job once it has the folder"
    )


def _packed(request: JobRequest, is_asked_for: bool) -> bytes:
    from pollux.storage.archive import pack

    folder = Path(request.workdir)
    if is_asked_for:
        return pack(folder)
    why = _named(request, is_asked_for)
    own = os.path.expanduser("~")
    # A user without a home folder, as in some containers, gets "~" from expanduser.
    if os.path.isabs(own) and Path(own).resolve().is_relative_to(folder.resolve()):
        raise InvalidInput(
            f"{why}, and a home folder is sent only with --ship: submit from the job's own folder, or set workdir"
        )
    try:
        return pack(folder)
    except TooLarge as error:
        raise TooLarge(f"{why}, and it cannot be sent: {error}") from None


def _named(request: JobRequest, is_asked_for: bool) -> str:
    return f"{request.name}: {request.workdir}" + ("" if is_asked_for else " does not exist where jobs run")


def _size(archive: bytes) -> str:
    return f"{len(archive) / 2**20:.1f} MiB" if len(archive) >= 2**20 else f"{len(archive) / 2**10:.1f} KiB"


def _with_folder_on_service(request: JobRequest, folder: str) -> JobRequest:
    local, checkpoint = Path(request.workdir), request.checkpoint
    if checkpoint.dir is not None and Path(checkpoint.dir).is_relative_to(local):
        checkpoint = replace(checkpoint, dir=None)
    return replace(request, workdir=folder, checkpoint=checkpoint)


def _send(client: Client, digest: str, archive: bytes) -> tuple[str, bool]:
    """The folder that the service unpacked the archive into, and whether it had done so before."""
    size, have, piece = len(archive), 0, b""
    # At most twice as many requests as pieces: others may send the same package at the same time.
    for turn in range(2 * (size // _PIECE_BYTES + 2)):
        data = base64.b64encode(piece).decode()
        answer = client.post("/v1/packages", {"digest": digest, "size": size, "offset": have, "data": data})
        if answer["folder"] is not None:
            return str(answer["folder"]), turn == 0
        have = min(int(answer["have"]), size)
        piece = archive[have : have + _PIECE_BYTES]
    raise InvalidInput("the service did not get the whole working folder: submit the job again")
