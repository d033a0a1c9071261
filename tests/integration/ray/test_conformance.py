"""The suite that every backend passes, on a real Ray cluster."""

import json

import pytest

from pollux.backends import create
from pollux.storage.state_file import write_state
from pollux.testing.conformance.backends import BackendConformance


class TestRay(BackendConformance):
    """Benches of one test alone follow one another, and take over each other's hosts, whose start costs the most."""

    address = ""
    secret = "5a" * 32

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def found(cls, cluster):
        cls.address = cluster.address

    @classmethod
    def backend(cls, home):
        (home / "run").mkdir(exist_ok=True)
        write_state(home / "run" / "fleet.secret", cls.secret.encode())
        service = "for-all" if home.parent.name.startswith("bench") else "for-one"
        if not (home / "ray.json").exists():
            (home / "ray.json").write_text(json.dumps({"service": service}))
        return create("ray", home=home, address=cls.address, cpu_places=True, warm=False)
