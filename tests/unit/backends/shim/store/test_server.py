"""The process that hosts a job's store, where the machine does not let it have what it asks for."""

import resource

import pytest
from tests.support.hosted_store import HostedStore

from pollux.agent.distributed.authenticated_store import AuthenticatedStore
from pollux.testing.waiting import PATIENCE_SECONDS


@pytest.mark.parametrize("error", [ValueError("not allowed to raise maximum limit"), PermissionError("not here")])
def test_a_limit_of_open_files_that_may_not_be_raised_ends_no_store(monkeypatch, tmp_path, error):
    def refuse(*_):
        raise error

    # Inherited by the host, which is forked.
    monkeypatch.setattr(resource, "setrlimit", refuse)
    store = HostedStore(tmp_path / "store.log")
    try:
        client = AuthenticatedStore(store.access, PATIENCE_SECONDS)
        client.set("key", "value")
        assert client.get("key") == b"value"
    finally:
        store.close()
    assert (tmp_path / "store.log").read_text() == ""
