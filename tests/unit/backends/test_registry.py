"""Backends by name."""

import sys
import types

import pytest

from pollux import backends
from pollux.backends import registry
from pollux.backends.protocol import BackendCapabilities
from pollux.core.errors import BackendFailed, InvalidInput, UnknownName


def test_unknown_names_suggest():
    for ask in (backends.create, backends.summary, backends.available, backends.options):
        with pytest.raises(UnknownName, match="did you mean 'local'"):
            ask("locl")


def test_unknown_options_suggest(tmp_path):
    with pytest.raises(InvalidInput, match="did you mean 'slots'"):
        backends.create("local", home=tmp_path, slot=3)


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(InvalidInput, match="use Linux"):
        backends.create("local", home=tmp_path)


def test_a_new_backend_says_what_it_lacks(monkeypatch):
    class Silent(BackendCapabilities):
        pass

    class Bells(BackendCapabilities):
        @classmethod
        def missing(cls):
            return "a bell: buy one"

    monkeypatch.setitem(sys.modules, "bells", types.SimpleNamespace(Bells=Bells, Silent=Silent))
    monkeypatch.setattr(registry, "_REGISTRY", {"bells": "bells:Bells", "silent": "bells:Silent"})
    assert backends.available("bells") == "a bell: buy one"
    assert backends.available("silent") is None


def test_inline_takes_one_replica_of_python_only(tmp_path):
    from pollux.backends.protocol import Launch
    from pollux.core import Placement

    backend = backends.create("inline", slots=2)
    with pytest.raises(BackendFailed, match="one replica a job"):
        backend.submit(Launch("job", 1, Placement.of({"inline": 2}), ("python", "x.py"), "/"))
    with pytest.raises(BackendFailed, match="python SCRIPT"):
        backend.submit(Launch("job", 1, Placement.of({"inline": 1}), ("sh", "x.sh"), "/"))


def test_a_home_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    backend = backends.create("local", home=tmp_path / "file", slots=1)
    with pytest.raises(BackendFailed, match="cannot work in"):
        backend.start(lambda event: None)
    backend.close()
