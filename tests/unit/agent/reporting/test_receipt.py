"""The receipt: append-only and bounded, never losing a change; JSON, text and picture; goes on after a restart."""

import importlib.util
import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest

from pollux.agent.reporting.receipt import EVENT_KINDS, Receipt
from pollux.agent.reporting.receipt_plot import draw, png
from pollux.agent.reporting.receipt_row import ReceiptRow
from pollux.core.errors import CheckpointMismatch, InvalidInput, UnknownName

SIZE = 10_000


def row(step=0, *, batch=100, replicas=1, efficiency=1.0, **values):
    """A moment of a run in which every step took 0.1 s at the given batch."""
    known = {"progress": step * batch * efficiency, "samples": step * batch, "seconds": 0.1 * step}
    return ReceiptRow(
        step=step,
        num_replicas=replicas,
        num_nodes=1,
        local_batch=batch // replicas,
        accumulation=0,
        total_batch=batch,
        lr_factors=(efficiency * batch / 100,),
        efficiency=efficiency,
        **{**known, **values},
    )


def new(mode="adaptive", **values):
    known = {"initial_batch": 100, "max_batch": 1600, "rule": "adascale", "dataset_size": SIZE, "clock": lambda: 5.0}
    return Receipt("digits", mode=mode, **{**known, **values})


def adaptive_run(realised=1.0, steps=400, change=100, noise=0.01, seed=0):
    """A run whose batch is quadrupled on the way; after it the loss moves on `realised` times as fast as predicted."""
    receipt, rng = new(), np.random.default_rng(seed)
    receipt.event("started", 0, 0.0, "one replica")
    progress = samples = 0.0
    edge = 0.0
    for step in range(steps):
        batch, efficiency = (100, 1.0) if step < change else (400, 0.5)
        if step == change:
            receipt.event("batch-changed", step, progress, "batch 100 → 400: +40 % goodput", gain=0.4)
            edge = progress
        true = progress if step < change else edge + realised * (progress - edge)
        loss = 0.2 + 2.0 * math.exp(-true / 15_000) + noise * rng.normal()
        receipt.sample(
            row(
                step,
                batch=batch,
                efficiency=efficiency,
                progress=progress,
                samples=int(samples),
                throughput=1000.0,
                goodput=900.0 * efficiency,
                noise_scale=300.0,
                noise_low=200.0,
                noise_high=450.0 if step > 20 else math.inf,
                loss=loss,
            )
        )
        progress += batch * efficiency
        samples += batch
        if step % 100 == 99:
            receipt.log({"accuracy": 1.0 - loss / 3}, samples=int(samples), epoch=step // 100, progress=progress)
            receipt.close_pass(step // 100, SIZE, "00ff")
    return receipt


class TestRows:
    def test_what_is_not_finite_is_unknown(self):
        receipt = new()
        receipt.sample(row(1, loss=math.nan, noise_high=math.inf, throughput=2.0))
        (kept,) = receipt.rows
        assert (kept.loss, kept.noise_high, kept.throughput) == (None, None, 2.0)

    def test_memory_is_bounded_and_the_newest_row_is_there(self):
        receipt = new()
        for step in range(50_001):
            receipt.sample(row(step))
        steps = [kept.step for kept in receipt.rows]
        assert 900 <= len(steps) <= 2001
        assert steps == sorted(set(steps))
        assert (steps[0], steps[-1]) == (0, 50_000)
        gaps = np.diff(steps[:-1])
        assert gaps.max() <= 2 * np.median(gaps), "thinned evenly, old and new alike"
        assert receipt.to_json()["rows_seen"] == 50_001

    def test_the_rows_next_to_a_change_stay(self):
        receipt = new()
        changes = [*range(997, 60_000, 1511)]
        batch = 100
        for step in range(60_000):
            if step in changes:
                batch += 1
            receipt.sample(row(step, batch=batch))
        steps = {kept.step for kept in receipt.rows}
        assert {step for change in changes for step in (change - 1, change)} <= steps
        assert len(steps) <= 2001
        assert [entry["step"] for entry in receipt.to_json()["configurations"]] == [0, *changes]

    def test_replica_time_counts_every_row(self):
        receipt = new()
        for step in range(5001):
            receipt.sample(row(step, batch=100, replicas=1 if step <= 2500 else 4))
        assert receipt.to_json()["totals"]["replica_seconds"] == pytest.approx(250.0 + 4 * 250.0)

    def test_numbers_of_numpy_are_numbers(self):
        receipt = new()
        receipt.sample(row(1, loss=np.float32(0.5), efficiency=np.float64(1.0), throughput=np.float32(math.inf)))
        receipt.event("resized", 1, 1.0, "", num_replicas=np.int64(2))
        assert json.dumps([receipt.to_json(), receipt.state_dict()], allow_nan=False)

    def test_the_rates_that_were_used_are_on_record(self):
        receipt = new()
        receipt.sample(row(1, learning_rates=(0.1, 0.2)))
        receipt.sample(row(2))
        receipt.sample(row(3, learning_rates=(np.float64(0.3),), loss=math.nan))
        assert receipt.to_json()["rows"]["learning_rates"] == [[0.1, 0.2], [], [0.3]]
        other = new()
        other.load_state_dict(json.loads(json.dumps(receipt.state_dict(), allow_nan=False)))
        assert other.rows == receipt.rows


class TestEvents:
    def test_they_have_reason_numbers_and_time(self):
        receipt = new()
        receipt.event("resized", 7, 70.0, "given two more", num_replicas=4)
        (event,) = receipt.to_json()["events"]
        assert event == {
            "kind": "resized",
            "step": 7,
            "progress": 70.0,
            "text": "given two more",
            "time": 5.0,
            "numbers": {"num_replicas": 4},
        }

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(UnknownName, match="did you mean 'resized'"):
            new().event("resize", 0, 0.0, "")
        with pytest.raises(UnknownName, match="unknown kind of event 'learning-rate'"):
            new().event("learning-rate", 0, 0.0, "rates are in the rows")

    def test_changes_are_all_kept_and_checkpoints_only_counted(self):
        receipt = new()
        for step in range(500):
            receipt.event("batch-changed", step, 0.0, "")
            receipt.event("checkpointed", step, 0.0, "")
        kinds = [event.kind for event in receipt.events]
        assert kinds.count("batch-changed") == 500
        assert kinds.count("checkpointed") == 20
        assert [event.step for event in receipt.events if event.kind == "checkpointed"] == list(range(480, 500))
        assert receipt.to_json()["totals"]["events"] == {"batch-changed": 500, "checkpointed": 500}

    def test_not_exact_is_said_once_with_its_reason(self):
        receipt = new("exact")
        assert receipt.to_json()["exact"] is True
        receipt.mark_not_exact("BatchNorm under accumulation", 3, 30.0)
        receipt.mark_not_exact("BatchNorm under accumulation", 4, 40.0)
        said = receipt.to_json()
        assert (said["exact"], said["not_exact_because"]) == (False, ["BatchNorm under accumulation"])
        assert [(event.kind, event.step) for event in receipt.events] == [("not-exact", 3)]

    def test_an_adaptive_run_is_not_called_exact(self):
        assert new().to_json()["exact"] is False

    def test_bad_settings_are_refused(self):
        with pytest.raises(UnknownName, match="unknown mode 'exakt'"):
            new("exakt")
        with pytest.raises(InvalidInput, match="initial_batch is 0"):
            new(initial_batch=0)


class TestMetrics:
    def test_they_are_kept_by_samples_and_epoch(self):
        receipt = new()
        receipt.log({"accuracy": 0.5, "recall": np.float32(0.25)}, samples=100, epoch=1, progress=90.0)
        receipt.log({"accuracy": math.nan}, samples=200, epoch=2, progress=180.0)
        metrics = receipt.to_json()["metrics"]
        assert metrics["accuracy"] == {
            "samples": [100, 200],
            "epoch": [1, 2],
            "progress": [90.0, 180.0],
            "value": [0.5, None],
        }
        assert metrics["recall"]["value"] == [0.25]

    def test_they_are_bounded_and_keep_the_ends(self):
        receipt = new()
        for index in range(9000):
            receipt.log({"accuracy": index}, samples=index, epoch=0, progress=float(index))
        samples = receipt.to_json()["metrics"]["accuracy"]["samples"]
        assert len(samples) <= 2000
        assert (samples[0], samples[-1]) == (0, 8999)

    def test_only_numbers_can_be_logged(self):
        with pytest.raises(InvalidInput, match=r"metric 'note' is 'good': log numbers"):
            new().log({"note": "good"}, samples=0, epoch=0, progress=0.0)


class TestJson:
    def test_it_is_strict_json_and_has_what_the_schema_says(self):
        said = adaptive_run().to_json()
        again = json.loads(json.dumps(said, allow_nan=False))
        assert again == said
        assert (said["schema"], said["version"], said["job"], said["mode"]) == (
            "pollux-receipt",
            1,
            "digits",
            "adaptive",
        )
        assert (said["initial_batch"], said["final_batch"], said["max_batch"], said["rule"]) == (
            100,
            400,
            1600,
            "adascale",
        )
        assert [entry["total_batch"] for entry in said["configurations"]] == [100, 400]
        assert len({len(column) for column in said["rows"].values()}) == 1
        assert said["rows"]["noise_high"][:1] == [None]
        assert said["ledger"][0] == {"pass": 0, "samples": SIZE, "hash": "00ff"}

    def test_progress_is_in_samples_of_an_exact_run(self):
        progress = adaptive_run().to_json()["progress"]
        last = 100 * 100 + 299 * 200
        assert progress["predicted"] == progress["exact_samples"] == last
        assert progress["samples"] == 100 * 100 + 299 * 400
        assert progress["mean_efficiency"] == pytest.approx(last / progress["samples"])
        assert progress["exact_steps"] == math.ceil(last / 100)

    def test_an_empty_receipt_is_one_too(self):
        said = new().to_json()
        assert json.dumps(said, allow_nan=False)
        assert said["progress"]["mean_efficiency"] is None
        assert said["final_batch"] == 100


def judged(receipt):
    (change,) = receipt.to_json()["progress"]["realised"]["changes"]
    assert (change["from_batch"], change["to_batch"]) == (100, 400)
    return change["realised_over_predicted"], change["low"], change["high"]


class TestRealised:
    @pytest.mark.parametrize("truth", [1.0, 0.6])
    def test_the_loss_tells_whether_the_prediction_held(self, truth):
        inside = 0
        for seed in range(20):
            ratio, low, high = judged(adaptive_run(truth, noise=0.005, seed=seed))
            assert low <= ratio <= high
            inside += low <= truth <= high
        assert inside >= 18

    def test_a_prediction_that_failed_is_told_from_one_that_held(self):
        assert judged(adaptive_run(0.3, noise=0.002))[2] < 0.7
        assert judged(adaptive_run(1.0, noise=0.002))[1] > 0.7

    def test_where_noise_hides_it_nothing_is_claimed(self):
        assert judged(adaptive_run(noise=1.0)) == (None, None, None)

    def test_few_rows_claim_nothing(self):
        assert judged(adaptive_run(steps=104)) == (None, None, None)

    def test_a_rollback_claims_nothing(self):
        receipt, rng = new(), np.random.default_rng(0)
        for step in range(40):
            progress = 1000.0 * (30 + step % 20)
            loss = 0.2 + 2.0 * math.exp(-progress / 15_000) + 1e-4 * rng.normal()
            receipt.sample(row(step, batch=400 if step >= 20 else 100, progress=progress, loss=loss))
        assert judged(receipt) == (None, None, None)

    def test_against_an_exact_run_by_equal_loss(self):
        def told(speed):
            receipt = new()
            for step in range(300):
                receipt.sample(row(step, progress=100.0 * step, loss=3.0 * math.exp(-speed * step / 100)))
            return receipt

        exact = told(1.0).to_json()
        said = told(0.5).to_json(reference=exact)["progress"]["realised"]["against_reference"]
        assert len(said["points"]) == 20
        for point in said["points"][2:-2]:
            assert point["realised"] == pytest.approx(0.5 * point["predicted"], abs=300)
        faster = told(2.0).to_json(reference=exact)["progress"]["realised"]["against_reference"]
        assert faster["points"][-1]["realised"] is None, "the exact run never had this loss"

    def test_a_reference_must_be_a_receipt(self):
        with pytest.raises(InvalidInput, match="the reference has schema 'None'"):
            adaptive_run().to_json(reference={})


class TestSummary:
    def test_it_says_what_was_adapted_and_why(self):
        text = adaptive_run().summary()
        assert len(text.splitlines()) <= 15
        for part in (
            "digits: adaptive, epoch 6.98 in 399 steps and 39.9 s",
            "100 → 400 (largest 400, at most 1600 allowed); learning rate by rule 'adascale', now ×2",
            "efficiency: 0.539 on average",
            "an exact run would take 698 steps",
            "noise scale: 300 samples, between 200 and 450",
            "batch-changed 1",
            "epoch 1.00: batch-changed: batch 100 → 400: +40 % goodput",
        ):
            assert part in text

    def test_an_unknown_noise_scale_has_a_lower_bound(self):
        receipt = new()
        receipt.sample(row(1, noise_scale=500.0, noise_low=80.0, noise_high=math.inf))
        assert "noise scale: unknown, at least 80 samples" in receipt.summary()

    def test_an_exact_run_is_short(self):
        receipt = new("exact", max_batch=None, rule="none", dataset_size=None)
        assert receipt.summary().endswith("nothing was recorded yet")
        receipt.sample(row(50, loss=0.5))
        lines = receipt.summary().splitlines()
        assert lines[0] == "digits: exact, 5,000 samples of progress in 50 steps and 5.0 s"
        assert "efficiency" not in receipt.summary()
        assert len(lines) <= 5

    def test_with_many_events_it_stays_short(self):
        receipt = adaptive_run()
        for kind in EVENT_KINDS:
            for step in range(50):
                receipt.event(kind, step, 0.0, "why")
        receipt.mark_not_exact("one")
        receipt.mark_not_exact("two")
        assert len(receipt.summary().splitlines()) <= 15


class TestWriting:
    def test_both_files_appear_whole(self, tmp_path):
        receipt = adaptive_run()
        folder = tmp_path / "deep" / "er"
        written = receipt.write(folder)
        assert [path.name for path in written] == ["receipt.json", "receipt.png"]
        assert json.loads(written[0].read_text()) == receipt.to_json()
        assert written[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert sorted(os.listdir(folder)) == ["receipt.json", "receipt.png"]

    def test_the_one_before_is_replaced(self, tmp_path):
        receipt = new()
        receipt.write(tmp_path)
        receipt.sample(row(3))
        receipt.write(tmp_path)
        assert json.loads((tmp_path / "receipt.json").read_text())["totals"]["steps"] == 3

    def test_a_failed_write_leaves_the_one_before(self, tmp_path, monkeypatch):
        receipt = new()
        receipt.write(tmp_path)

        def full(handle):
            raise OSError("no space left")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(InvalidInput, match=r"receipt.json: no space left; choose another folder"):
            receipt.write(tmp_path)
        assert os.listdir(tmp_path) == ["receipt.json"]
        assert json.loads((tmp_path / "receipt.json").read_text()) == receipt.to_json()

    def test_a_folder_that_is_a_file_is_refused(self, tmp_path):
        (tmp_path / "taken").write_text("")
        with pytest.raises(InvalidInput, match="cannot be written"):
            new().write(tmp_path / "taken")

    def test_without_matplotlib_there_is_the_json_alone(self, tmp_path, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
        receipt = adaptive_run()
        assert [path.name for path in receipt.write(tmp_path)] == ["receipt.json"]
        with pytest.raises(InvalidInput, match=r"pollux-scheduler\[plot\]"):
            png(receipt.to_json())


class TestPicture:
    def test_panels_share_progress_in_epochs(self):
        figure = draw(adaptive_run().to_json())
        labels = {axes.get_xlabel() for axes in figure.axes} - {""}
        assert labels == {"progress in epochs"}
        curves = {line.get_label() for axes in figure.axes for line in axes.get_lines()}
        wanted = {"total batch", "replicas", "efficiency", "noise scale", "loss", "accuracy", "goodput, predicted"}
        assert wanted | {"goodput, measured", "batch changed"} <= curves

    def test_curves_stop_at_a_rollback_and_what_was_undone_is_pale(self):
        receipt = new()
        for step in (*range(10), *range(6, 15)):
            receipt.sample(row(step, loss=1.0))
        receipt.event("rolled-back", 6, 600.0, "loss jumped")
        figure = draw(receipt.to_json())
        losses = [line for axes in figure.axes if axes.get_ylabel() == "loss" for line in axes.get_lines()]
        shown = [(line.get_alpha(), [round(x * SIZE) // 100 for x in np.asarray(line.get_xdata())]) for line in losses]
        assert shown == [(1.0, [*range(7)]), (0.35, [6, 7, 8, 9]), (1.0, [*range(6, 15)])]

    def rate_panels(self, receipt):
        return [axes for axes in draw(receipt.to_json()).axes if axes.get_ylabel() == "learning rate"]

    def test_the_rate_used_is_drawn_beside_its_factor(self):
        receipt = new()
        for step in range(10):
            receipt.sample(row(step, learning_rates=(0.01 * (step + 1), 9.0)))
        (panel,) = self.rate_panels(receipt)
        (line,) = panel.get_lines()
        assert np.asarray(line.get_ydata()) == pytest.approx([0.01 * (step + 1) for step in range(10)])
        assert (panel.get_yscale(), panel.get_ylim()[0]) == ("linear", 0.0)
        receipt.sample(row(11, learning_rates=(1e-5, 9.0)))
        receipt.sample(row(12, learning_rates=(0.0, 9.0)))
        assert self.rate_panels(receipt)[0].get_yscale() == "log"
        assert png(receipt.to_json())

    def test_where_no_rate_is_known_there_is_the_factor_alone(self):
        assert self.rate_panels(adaptive_run()) == []
        receipt = adaptive_run().to_json()
        del receipt["rows"]["learning_rates"]
        assert png(receipt), "one that was written before there were rates"

    def test_a_bare_exact_run_can_be_drawn(self):
        receipt = new("exact", dataset_size=None)
        receipt.sample(row(0))
        figure = draw(receipt.to_json())
        assert figure.axes[4].get_xlabel() == "progress in samples"
        assert png(receipt.to_json())

    def test_every_kind_of_event_can_be_drawn(self):
        receipt = adaptive_run()
        for number, kind in enumerate(EVENT_KINDS):
            receipt.event(kind, number, 3000.0 * number, "why")
        receipt.sample(replace(receipt.rows[-1], lr_factors=(1.0, 2.0, 3.0)))
        assert png(receipt.to_json())

    def test_without_rows_there_is_nothing_to_draw(self):
        with pytest.raises(InvalidInput, match="has no rows yet"):
            draw(new().to_json())


class TestState:
    def test_a_receipt_goes_on_after_json(self):
        receipt = adaptive_run()
        receipt.log({"accuracy": math.nan}, samples=1, epoch=1, progress=1.0)
        receipt.mark_not_exact("for a test")
        other = new()
        other.load_state_dict(json.loads(json.dumps(receipt.state_dict(), allow_nan=False)))
        assert other.to_json() == receipt.to_json()
        for each in (receipt, other):
            each.sample(row(1000, batch=800, progress=1e5))
            each.event("resumed", 1000, 1e5, "")
        assert other.to_json() == receipt.to_json()

    def test_a_thinned_one_goes_on_as_the_first_would(self):
        receipt, other = new(), new()
        for step in range(3001):
            receipt.sample(row(step))
        other.load_state_dict(json.loads(json.dumps(receipt.state_dict(), allow_nan=False)))
        for each in (receipt, other):
            for step in range(3001, 9000):
                each.sample(row(step, batch=100 if step < 7001 else 200))
        assert other.to_json() == receipt.to_json()

    def test_a_state_from_before_there_were_rates_goes_on(self):
        receipt, other = adaptive_run(), new()
        state = json.loads(json.dumps(receipt.state_dict(), allow_nan=False))
        del state["rows"]["learning_rates"], state["latest"]["learning_rates"]
        other.load_state_dict(state)
        assert other.to_json() == receipt.to_json()
        assert other.rows[-1].learning_rates == ()

    def test_an_empty_one_goes_on(self):
        other = new()
        other.load_state_dict(json.loads(json.dumps(new().state_dict())))
        assert other.to_json() == new().to_json()

    def test_another_version_is_refused(self):
        with pytest.raises(CheckpointMismatch, match="version 99"):
            new().load_state_dict({"version": 99})
