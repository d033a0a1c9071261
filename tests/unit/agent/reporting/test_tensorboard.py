"""TensorBoard scalars: what is known of each row, by samples; a resumed run has no sample twice."""

import builtins
import importlib
import math
import os

import pytest

from pollux.agent.reporting.receipt_row import ReceiptRow
from pollux.agent.reporting.tensorboard import Scalars
from pollux.core.errors import InvalidInput


def row(samples, **values):
    known = {"progress": 0.8 * samples, "seconds": 1.0, "num_replicas": 2, "num_nodes": 1, "local_batch": 8}
    more = {"accumulation": 0, "total_batch": 16, "lr_factors": (1.5,), "efficiency": 0.8}
    return ReceiptRow(step=samples // 16, samples=samples, **{**known, **more, **values})


def read(folder):
    """Every scalar that TensorBoard would show: tag -> [(samples, value)]."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_rows_and_metrics_are_written_by_samples(tmp_path):
    scalars = Scalars(tmp_path)
    scalars.row(row(16, loss=0.5, noise_high=math.inf))
    scalars.row(row(32, loss=0.25, noise_scale=100.0))
    scalars.metrics({"accuracy": 0.75}, 32)
    scalars.flush()
    scalars.close()
    seen = read(tmp_path)
    assert seen["pollux/loss"] == [(16, 0.5), (32, 0.25)]
    assert seen["pollux/total_batch"] == [(16, 16.0), (32, 16.0)]
    assert seen["pollux/lr_factor"] == [(16, 1.5), (32, 1.5)]
    assert seen["pollux/noise_scale"] == [(32, 100.0)]
    assert seen["metrics/accuracy"] == [(32, 0.75)]
    assert "pollux/noise_high" not in seen


def test_each_parameter_group_has_its_own_factor(tmp_path):
    scalars = Scalars(tmp_path)
    scalars.row(row(16, lr_factors=(1.0, 2.0)))
    scalars.close()
    seen = read(tmp_path)
    assert (seen["pollux/lr_factor_0"], seen["pollux/lr_factor_1"]) == ([(16, 1.0)], [(16, 2.0)])


def test_each_parameter_group_has_the_rate_it_used(tmp_path):
    scalars = Scalars(tmp_path)
    scalars.row(row(16, learning_rates=(0.5, 0.25)))
    scalars.row(row(32, learning_rates=(math.inf, 0.125)))
    scalars.row(row(48))
    scalars.close()
    seen = read(tmp_path)
    assert seen["pollux/learning_rate/0"] == [(16, 0.5)]
    assert seen["pollux/learning_rate/1"] == [(16, 0.25), (32, 0.125)]


def test_a_resumed_run_has_no_sample_twice(tmp_path):
    first = Scalars(tmp_path)
    for samples in (16, 32, 48, 64):
        first.row(row(samples, loss=1.0))
    first.close()
    second = Scalars(tmp_path, resumed_samples=32)
    for samples in (48, 80):
        second.row(row(samples, loss=2.0))
    second.close()
    assert read(tmp_path)["pollux/loss"] == [(16, 1.0), (32, 1.0), (48, 2.0), (80, 2.0)]


def test_a_rollback_hides_what_was_undone(tmp_path):
    scalars = Scalars(tmp_path)
    for samples in (16, 32, 48):
        scalars.row(row(samples, loss=1.0))
    scalars.rolled_back(16)
    scalars.row(row(32, loss=3.0))
    scalars.close()
    assert read(tmp_path)["pollux/loss"] == [(16, 1.0), (32, 3.0)]


def test_only_replica_0_writes(tmp_path):
    scalars = Scalars(tmp_path / "runs", replica=1)
    scalars.row(row(16))
    scalars.metrics({"accuracy": 1.0}, 16)
    scalars.rolled_back(0)
    scalars.flush()
    scalars.close()
    assert not (tmp_path / "runs").exists()


def test_nothing_is_opened_before_the_first_value(tmp_path):
    scalars = Scalars(tmp_path / "runs")
    scalars.close()
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_a_file_is_said_once_and_nothing_is_written(tmp_path, caplog):
    (tmp_path / "taken").write_text("")
    scalars = Scalars(tmp_path / "taken")
    for samples in (16, 32):
        scalars.row(row(samples))
    scalars.flush()
    scalars.close()
    assert [text.getMessage().count("cannot be written to") for text in caplog.records] == [1]
    assert os.listdir(tmp_path) == ["taken"]


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    genuine = builtins.__import__

    def without(name, *rest):
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return genuine(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidInput, match=r"pollux-scheduler\[tensorboard\]"):
        Scalars(tmp_path)
