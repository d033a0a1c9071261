"""Addresses of object stores, such as `s3://bucket/path`, which may hold checkpoints instead of a folder.

`object_store` opens them.
"""

from __future__ import annotations

import re

from pollux.core.errors import InvalidInput

__all__ = ["PACKAGES", "address_fault", "is_address", "scheme_of", "store_address"]

PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "hdfs": "pyarrow", "oss": "ossfs",
}  # fmt: skip
"""The schemes of stores, and the package that each needs where jobs run."""

_SCHEMES = ", ".join(f"{scheme}://" for scheme in PACKAGES)
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_MOST_CHARACTERS = 1000


def is_address(text: str) -> bool:
    """Whether the text is an address, valid or not, instead of a folder."""
    return _ADDRESS.fullmatch(text) is not None


def scheme_of(address: str) -> str:
    """What comes before `://`."""
    return address.partition("://")[0].lower()


def address_fault(text: str) -> str:
    """What to change in an invalid address; empty if it is valid."""
    found = _ADDRESS.fullmatch(text)
    if found is None or found[1].lower() not in PACKAGES:
        return f"stores are {_SCHEMES}; give one of them, or a folder that all nodes share"
    bucket, *parts = found[2].rstrip("/").split("/")
    if not bucket or not parts:
        return f"give a bucket and a path in it, such as {found[1]}://bucket/checkpoints/name"
    if _has_key(found[1].lower(), bucket):
        return "leave the key out, since lists and logs would show it: give it by 'env' or in the settings of the nodes"
    if not {"", ".", ".."}.isdisjoint(parts) or not set("?#*[\\").isdisjoint(text):
        return "leave out empty parts, '.', '..' and the characters ? # * [ \\"
    if not text.isprintable() or len(text) > _MOST_CHARACTERS:
        return f"give at most {_MOST_CHARACTERS} characters, all of them printable"
    return ""


def _has_key(scheme: str, bucket: str) -> bool:
    """Whether a key stands before the bucket. In Azure's addresses, the container stands there."""
    before, at, _ = bucket.partition("@")
    return bool(at) and (":" in before or not scheme.startswith("abfs"))


def store_address(text: str) -> str:
    """The address in its normal form; `InvalidInput` if it is not valid."""
    fault = address_fault(text)
    if fault:
        raise InvalidInput(f"'{text[:200]}' is not an address for checkpoints: {fault}")
    scheme, _, rest = text.partition("://")
    return f"{scheme.lower()}://{rest.rstrip('/')}"
