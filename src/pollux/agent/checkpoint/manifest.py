"""The manifest of a checkpoint, and whether its files are as it says.

The manifest lists every file with size and SHA-256 and carries a checksum of its own, so that a checkpoint is known
to be whole, of a known format and of the same model before anything in it is unpickled.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeAlias

from pollux.core.errors import CheckpointDamaged, CheckpointMismatch, InvalidInput

__all__ = [
    "FORMAT",
    "JSON",
    "MANIFEST_NAME",
    "FileDigest",
    "Manifest",
    "created_at",
    "decode",
    "digest_file",
    "encode",
    "frozen_json",
    "located",
    "read_manifest",
    "require_same_signature",
    "verify_files",
]

FORMAT = 1
"""Version of the layout that this code writes and reads."""

MANIFEST_NAME = "pollux.json"
"""Name of the manifest inside a checkpoint's folder."""

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

_OPENING = b'{\n "checksum": "'
_CLOSING = b'",'


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Length of a file in bytes and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The entries of `pollux.json` without its own checksum.

    `created` is UTC in ISO 8601; `values` is the job's state that JSON can hold; `signature` says what a job must be
    like to load this; `tied` maps a tensor's name to the name under which its content was written; `files` has
    every file of the folder but the manifest.
    """

    format: int
    pollux: str
    torch: str
    created: str
    step: int
    num_replicas: int
    values: Mapping[str, JSON]
    signature: Mapping[str, JSON]
    tied: Mapping[str, str]
    files: Mapping[str, FileDigest]


def created_at(created: str) -> float | None:
    """A manifest's `created` in seconds since 1970; None where it is no time."""
    try:
        return datetime.datetime.fromisoformat(created).timestamp()
    except ValueError:
        return None


def encode(manifest: Manifest) -> bytes:
    """The manifest as one JSON object whose first entry is the SHA-256 of all the rest, byte for byte."""
    body = json.dumps(asdict(manifest), indent=1, sort_keys=True).encode()[1:]
    return _OPENING + hashlib.sha256(body).hexdigest().encode() + _CLOSING + body


def decode(content: bytes) -> Manifest:
    """The manifest that `encode` wrote.

    Raises `CheckpointDamaged` where a byte differs, `CheckpointMismatch` where it is whole but of another format.
    """
    start = len(_OPENING)
    checksum, closing, body = content[start:].partition(_CLOSING)
    if content[:start] != _OPENING or not closing or hashlib.sha256(body).hexdigest().encode() != checksum:
        raise CheckpointDamaged(f"{MANIFEST_NAME}: its own checksum does not fit its {len(content)} bytes")
    try:
        entries = json.loads(b"{" + body)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME}: it cannot be read: {error}"[:200]) from None
    if entries.get("format") != FORMAT:
        raise CheckpointMismatch(
            f"{MANIFEST_NAME}: format {entries.get('format')}, written by pollux {entries.get('pollux')}; this version "
            f"reads format {FORMAT}: use the pollux that wrote it, or another checkpoint folder"
        )
    if set(entries) != {field.name for field in fields(Manifest)}:
        raise CheckpointDamaged(f"{MANIFEST_NAME}: its entries are {', '.join(sorted(entries))}")
    try:
        entries["files"] = {name: FileDigest(**digest) for name, digest in entries["files"].items()}
    except (AttributeError, TypeError) as error:
        raise CheckpointDamaged(f"{MANIFEST_NAME}: its files are no names with digests: {error}"[:200]) from None
    return Manifest(**entries)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, checked against its own checksum only; see `verify_files`."""
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
    except OSError as error:
        raise CheckpointDamaged(f"{folder / MANIFEST_NAME}: {error.strerror or error}") from error
    with located(folder):
        return decode(content)


@contextlib.contextmanager
def located(where: object) -> Iterator[None]:
    """Let errors about a checkpoint say where it is."""
    try:
        yield
    except (CheckpointDamaged, CheckpointMismatch) as error:
        raise type(error)(f"{where}: {error}") from error


def digest_file(path: Path, *, from_disk: bool = False) -> FileDigest:
    """Size and SHA-256 of a file; with `from_disk` its cached pages are dropped first, where the system can."""
    with path.open("rb") as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(os.fstat(file.fileno()).st_size, checksum)


def verify_files(folder: Path, files: Mapping[str, FileDigest], *, from_disk: bool = False) -> None:
    """Raise `CheckpointDamaged` naming the first file that is missing or differs in size or content.

    Sizes are looked at first, since that costs nothing. Files that are not listed are left alone.
    """
    for name, expected in sorted(files.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointDamaged(f"{folder / name}: {error.strerror or error}") from error
        if size != expected.size:
            raise CheckpointDamaged(f"{folder / name}: {size} bytes, {expected.size} were written")
    for name, expected in sorted(files.items()):
        try:
            found = digest_file(folder / name, from_disk=from_disk)
        except OSError as error:
            raise CheckpointDamaged(f"{folder / name}: {error.strerror or error}") from error
        if found != expected:
            raise CheckpointDamaged(f"{folder / name}: its content is not what was written (SHA-256 differs)")


def frozen_json(what: str, values: Mapping[str, JSON]) -> dict[str, JSON]:
    """A copy of `values` by way of JSON (tuples become lists, keys text); `InvalidInput` names what JSON cannot hold.

    Infinite and undefined floats are kept, in Python's spelling.
    """
    frozen: dict[str, JSON] = {}
    for name, value in values.items():
        try:
            frozen[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(
                f"{what} '{name}' cannot go into a checkpoint's manifest: {error}; pass it among the objects"
            ) from error
    return frozen


def require_same_signature(saved: Mapping[str, JSON], here: Mapping[str, JSON]) -> None:
    """Raise `CheckpointMismatch` naming the first thing in which two signatures differ.

    An entry is a value, or a mapping from names to values; the entry's key says what has these names, as in
    `{"parameter": {"layer.weight": "[10, 32] float32"}, "optimizer": "AdamW"}`. Both sides are compared as JSON.
    """
    theirs, ours = frozen_json("signature", saved), frozen_json("signature", here)
    for thing, inside, outside in _pairs("", theirs, ours):
        if inside == outside:
            continue
        if inside is _Absent or outside is _Absent:
            places = ("the model", "the checkpoint") if inside is _Absent else ("the checkpoint", "the model")
            raise CheckpointMismatch(f"{thing} is in {places[0]} but not in {places[1]}; {_REMEDY}")
        raise CheckpointMismatch(f"{thing} is {inside} in the checkpoint, {outside} in the model; {_REMEDY}")


_REMEDY = "load it into the job that wrote it, or give another checkpoint folder"


class _Absent:
    """Stands for a name that one of two signatures does not have."""


def _pairs(path: str, theirs: Mapping[str, object], ours: Mapping[str, object]) -> list[tuple[str, object, object]]:
    pairs: list[tuple[str, object, object]] = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        thing = f"{path} {name}".lstrip()
        inside, outside = theirs.get(name, _Absent), ours.get(name, _Absent)
        if isinstance(inside, Mapping) and isinstance(outside, Mapping):
            pairs.extend(_pairs(thing, inside, outside))
        else:
            pairs.append((thing, inside, outside))
    return pairs
