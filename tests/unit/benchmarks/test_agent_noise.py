"""The cases of the noise scale's benchmark."""

import importlib
from pathlib import Path


def test_every_case_near_the_batch_is_also_tried_far_above_it(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    noise = importlib.import_module("agent_noise")
    names = [case.name for case in noise.cases()]
    near = {name for name in names if not name.endswith("/far")}
    assert len(near) == 12
    assert {f"{name}/far" for name in near} == set(names) - near
