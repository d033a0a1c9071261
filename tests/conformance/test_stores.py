"""Every store and telemetry through the suites that the package ships."""

import contextlib

import pytest

from pollux.store import open_store, open_telemetry
from pollux.testing.conformance.stores import (
    DurableStoreConformance,
    DurableTelemetryConformance,
    StoreConformance,
    TelemetryConformance,
)


@pytest.fixture
def opened():
    """Closes what it is given."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self, opened):
        return opened(open_store(None))


class TestSqliteStore(DurableStoreConformance):
    @pytest.fixture
    def store(self, opened, tmp_path):
        return opened(open_store(tmp_path / "store.sqlite"))

    @pytest.fixture
    def reopen(self, opened, tmp_path):
        def again(store):
            store.close()
            return opened(open_store(tmp_path / "store.sqlite"))

        return again


class TestMemoryTelemetry(TelemetryConformance):
    @pytest.fixture
    def telemetry(self, opened):
        return opened(open_telemetry(None))


class TestSqliteTelemetry(DurableTelemetryConformance):
    @pytest.fixture
    def telemetry(self, opened, tmp_path):
        return opened(open_telemetry(tmp_path / "telemetry.sqlite"))

    @pytest.fixture
    def reopen(self, opened, tmp_path):
        def again(telemetry):
            telemetry.close()
            return opened(open_telemetry(tmp_path / "telemetry.sqlite"))

        return again
