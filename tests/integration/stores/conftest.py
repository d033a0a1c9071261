"""A real S3 server, with an empty bucket for every test."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.s3 import make_bucket, s3_server

from pollux.storage.object_store import ObjectStore


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The variables by which every client finds it; they are set while it runs."""
    with s3_server() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables


@pytest.fixture
def bucket(s3: dict[str, str]) -> str:
    """The name of a new one."""
    name = f"bucket-{secrets.token_hex(8)}"
    make_bucket(name)
    return name


@pytest.fixture
def store(bucket: str, tmp_path: Path) -> Callable[[str], ObjectStore]:
    """The same store as seen by the machine of a name, which has copies of its own."""

    def of(machine: str = "a") -> ObjectStore:
        found = ObjectStore(f"s3://{bucket}/jobs/train", tmp_path / machine)
        found.make_cache()
        return found

    return of
