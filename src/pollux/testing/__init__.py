"""Support for tests, shipped for authors of extensions too: builders, a fake driver, suites to inherit.

What is re-exported here needs nothing beyond the package itself. `pollux.testing.conformance.policies` (pytest) and
`pollux.testing.strategies` (hypothesis) are imported by name; install the extra `dev` for them.
"""

from __future__ import annotations

from pollux.testing.application import FakeApplication
from pollux.testing.builders import (
    FakeOracle,
    SaturatingGoodput,
    after,
    cluster,
    goodput_model,
    job,
    place,
    snapshot,
)
from pollux.testing.driver import DriverLog, FakeDriver, FakeWork

__all__ = [
    "DriverLog",
    "FakeApplication",
    "FakeDriver",
    "FakeOracle",
    "FakeWork",
    "SaturatingGoodput",
    "after",
    "cluster",
    "goodput_model",
    "job",
    "place",
    "snapshot",
]
