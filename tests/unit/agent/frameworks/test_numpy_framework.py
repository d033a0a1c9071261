"""What every framework can reuse, used by one of plain numpy in processes in which PyTorch cannot be imported."""

import json
import subprocess
import sys

import numpy as np
from tests.unit.agent.frameworks import numpy_framework as framework

from pollux.testing.waiting import PATIENCE_SECONDS

BATCH = 16


def train(folder, **options):
    folder.mkdir(exist_ok=True)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, framework.__file__, str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["torch"], "nothing brought PyTorch along"
    assert result["ledger_is_right"]
    return result


def plain_numpy(epochs):
    """Weights and samples of the same training written by hand."""
    x, y = framework.data()
    weights, velocity, used = np.zeros(framework.FEATURES), np.zeros(framework.FEATURES), []
    for epoch in range(epochs):
        order = framework.permutation(framework.SAMPLES, framework.SEED, epoch)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            _, gradient = framework.loss_and_gradient(weights, x[batch], y[batch])
            velocity = framework.MOMENTUM * velocity + gradient
            weights = weights - framework.RATE * velocity
            used.append(batch.tolist())
    return weights.tolist(), used


def passes(used):
    """All samples in the order in which steps used them, cut into passes."""
    flat = [sample for step in used for sample in step]
    return [flat[first : first + framework.SAMPLES] for first in range(0, len(flat), framework.SAMPLES)]


def require_every_sample_once_a_pass(used):
    for number, samples in enumerate(passes(used)):
        order = framework.permutation(framework.SAMPLES, framework.SEED, number)
        assert samples == order[: len(samples)].tolist()


def test_exact_mode_equals_plain_numpy_and_a_resumed_run_repeats_it(tmp_path):
    weights, used = plain_numpy(2)
    whole = train(tmp_path / "whole", epochs=2, batch=BATCH)
    assert whole["weights"] == weights
    assert whole["used"] == used
    assert whole["receipt"]["mode"] == "exact"
    assert [entry["samples"] for entry in whole["receipt"]["ledger"]] == [framework.SAMPLES] * 2
    assert whole["reported"]["final"]
    assert whole["reported"]["samples"] == 2 * framework.SAMPLES

    first = train(tmp_path / "parts", epochs=2, batch=BATCH, last_step=45)
    second = train(tmp_path / "parts", epochs=2, batch=BATCH)
    assert first["used"] + second["used"] == used
    assert second["weights"] == weights


def test_accumulated_exact_steps_are_those_of_the_whole_batch(tmp_path):
    weights, _ = plain_numpy(1)
    parts = train(tmp_path, epochs=1, batch=BATCH, local_max=5)
    np.testing.assert_allclose(parts["weights"], weights, rtol=1e-12)
    require_every_sample_once_a_pass(parts["used"])


def test_an_adaptive_run_grows_its_batch_and_goes_on_with_it_after_a_restart(tmp_path):
    first = train(tmp_path, epochs=30, batch=BATCH, max_batch=256, last_step=450)
    second = train(tmp_path, epochs=30, batch=BATCH, max_batch=256)
    assert first["batch"] > BATCH
    assert first["guard_watched"] >= 1
    assert first["noise_measured"] >= 20
    assert first["profile_keys"] >= 2
    assert 1.0 < first["lr_factor"] <= first["batch"] / BATCH
    assert 0.0 < first["efficiency"] < 1.0
    assert second["batch"] >= first["batch"]
    assert len(second["used"][0]) == first["batch"], "the batch that was reached is gone on with"
    require_every_sample_once_a_pass(first["used"] + second["used"])
    assert second["progress"] >= 30 * framework.SAMPLES
    assert "receipt.json" in second["written"]
    assert second["receipt"]["mode"] == "adaptive"
    assert second["rows"] > first["rows"]
    assert second["reported"]["model"] is not None
    assert second["reported"]["batch_size"] == second["batch"]
