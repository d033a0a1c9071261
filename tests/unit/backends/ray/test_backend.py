import importlib.metadata
import importlib.util

import pytest

from pollux.backends import available, create, option_kinds
from pollux.backends.ray.backend import RayBackend
from pollux.core.errors import InvalidInput


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "head", "head:", ":6379", "head:port", "head:0", "head:70000", ""]
)
def test_an_address_that_cannot_be_is_refused(tmp_path, address):
    with pytest.raises(InvalidInput, match="address is"):
        RayBackend(tmp_path, address=address)


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_making_one_asks_ray_for_nothing(tmp_path, address):
    backend = RayBackend(tmp_path, address=address)
    assert (backend.name, backend.inventory(), backend.warnings()) == ("ray", (), ())


def test_slots_must_be_some(tmp_path):
    with pytest.raises(InvalidInput, match="slots is 0"):
        RayBackend(tmp_path, slots=0)


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'pollux-scheduler[ray]'" in RayBackend.missing()
    assert available("ray") == RayBackend.missing()
    with pytest.raises(InvalidInput, match="cannot be used here"):
        create("ray", home="unused")


@pytest.mark.parametrize(
    ("version", "fits"), [("2.9.3", False), ("2.49.1", False), ("2.50.0", True), ("3.0.0rc1", True)]
)
def test_an_old_ray_is_too_old(monkeypatch, version, fits):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert (RayBackend.missing() == "") is fits
    if not fits:
        assert version in RayBackend.missing()


def test_something_else_called_ray_is_not_ray(monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert "not Ray" in RayBackend.missing()


def test_its_options_are_known():
    assert {"address", "slots", "cpu_places", "autoscale", "head"} <= set(option_kinds("ray"))
