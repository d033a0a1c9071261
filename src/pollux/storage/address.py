"""Addresses of object stores, where checkpoints may lie instead of in a folder: `s3://bucket/path`.

Only how addresses are written; what is behind them is in `object_store`.
"""

from __future__ import annotations

import re

from pollux.core.errors import InvalidInput

__all__ = ["PACKAGES", "address_fault", "is_address", "scheme_of", "store_address"]

PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "hdfs": "pyarrow", "oss": "ossfs",
}  # fmt: skip
"""The kinds of stores, and the package that each one needs where jobs run."""

_SCHEMES = ", ".join(f"{scheme}://" for scheme in PACKAGES)
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_MOST_CHARACTERS = 1000


def is_address(text: str) -> bool:
    """Whether the text is meant as an address, valid or not, and not as a folder."""
    return _ADDRESS.fullmatch(text) is not None


def scheme_of(address: str) -> str:
    """What comes before `://`."""
    return address.partition("://")[0].lower()


def address_fault(text: str) -> str:
    """What is to be changed in an address that is not valid; empty where it is."""
    found = _ADDRESS.fullmatch(text)
    if found is None or found[1].lower() not in PACKAGES:
        return f"stores are {_SCHEMES}; give one of them, or a folder that all nodes share"
    bucket, *parts = found[2].rstrip("/").split("/")
    if not bucket or not parts:
        return f"give a bucket and a path in it, such as {found[1]}://bucket/checkpoints/name"
    if _has_key(found[1].lower(), bucket):
        return "leave the key out, it would be seen in lists and logs: give it by 'env' or the nodes' own settings"
    if not {"", ".", ".."}.isdisjoint(parts) or not set("?#*[\\").isdisjoint(text):
        return "leave out empty parts, '.', '..' and the characters ? # * [ \\"
    if not text.isprintable() or len(text) > _MOST_CHARACTERS:
        return f"give at most {_MOST_CHARACTERS} characters, all of them printable"
    return ""


def _has_key(scheme: str, bucket: str) -> bool:
    """Whether a key stands before the bucket. Azure's own addresses have the container before the account there."""
    before, at, _ = bucket.partition("@")
    return bool(at) and (":" in before or not scheme.startswith("abfs"))


def store_address(text: str) -> str:
    """The address in its normal form; `InvalidInput` where it is not valid."""
    fault = address_fault(text)
    if fault:
        raise InvalidInput(f"'{text[:200]}' is no address for checkpoints: {fault}")
    scheme, _, rest = text.partition("://")
    return f"{scheme.lower()}://{rest.rstrip('/')}"
