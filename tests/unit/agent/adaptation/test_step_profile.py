"""The throughput profile: robust, recency-weighted, bounded, and rows that a fit can use."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.adaptation.step_profile import Profile, ProfileKey
from pollux.core.errors import CheckpointMismatch, InvalidInput
from pollux.goodput import Observation, PublishedThroughput, fit

ALONE = ProfileKey(1, 1, 32.0, "h200")
FOUR = ProfileKey(1, 4, 32.0, "h200")


def fill(profile, key, step, compute=None, data=0.001, repeats=1, count=20, warm_up=2):
    for _ in range(warm_up + count):
        profile.add(key, compute_seconds=compute, step_seconds=step, data_seconds=data, repeats=repeats)


def only(profile: Profile, gpu_type: str = "h200") -> Observation:
    (row,) = profile.observations(gpu_type)
    return row


class TestCost:
    def test_steady_steps_cost_what_they_took(self):
        profile = Profile()
        fill(profile, FOUR, step=0.5, compute=0.3, data=0.02)
        row = only(profile)
        assert (row.compute_seconds, row.step_seconds) == pytest.approx((0.3, 0.5))

    def test_unsynchronised_micro_steps_are_taken_off(self):
        profile = Profile()
        fill(profile, FOUR, step=3 * 0.3 + 0.5, compute=0.3, repeats=4)
        assert only(profile).step_seconds == pytest.approx(0.5)
        assert only(profile).compute_seconds == pytest.approx(0.3)

    def test_a_step_is_never_shorter_than_its_computation(self):
        profile = Profile()
        fill(profile, FOUR, step=0.9, compute=0.3, repeats=4)
        assert only(profile).step_seconds == pytest.approx(0.3)

    def test_the_first_steps_of_a_key_are_warm_up(self):
        profile = Profile()
        fill(profile, ALONE, step=30.0, count=0)
        assert profile.observations("h200") == []
        fill(profile, ALONE, step=0.2, count=1, warm_up=0)
        assert only(profile).step_seconds == pytest.approx(0.2)

    def test_every_key_warms_up_again_after_a_restart(self):
        profile = Profile()
        fill(profile, ALONE, step=0.2, count=3)
        profile.load_state_dict(profile.state_dict())
        fill(profile, ALONE, step=30.0, count=0)
        assert only(profile).step_seconds == pytest.approx(0.2)

    def test_a_fifth_of_the_steps_may_be_outliers(self):
        profile, rng = Profile(), random.Random(1)
        for index in range(66):
            outlier = rng.choice([0.0, 50.0]) if index % 5 == 0 else 0.0
            step = 0.2 * rng.uniform(0.98, 1.02) + outlier
            profile.add(ALONE, compute_seconds=None, step_seconds=step, data_seconds=0.0, repeats=1)
        assert only(profile).step_seconds == pytest.approx(0.2, rel=0.01)

    def test_a_machine_that_slows_is_followed(self):
        profile = Profile()
        fill(profile, ALONE, step=0.2, count=500)
        fill(profile, ALONE, step=0.4, count=64, warm_up=0)
        assert only(profile).step_seconds == pytest.approx(0.4)

    def test_the_newer_half_of_a_window_counts_for_more(self):
        profile = Profile()
        fill(profile, ALONE, step=0.2, count=32)
        fill(profile, ALONE, step=0.4, count=32, warm_up=0)
        assert only(profile).step_seconds > 0.32

    @pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
    def test_a_clock_that_errs_is_not_believed(self, seconds):
        profile = Profile()
        fill(profile, FOUR, step=0.5, compute=0.3)
        profile.add(FOUR, compute_seconds=seconds, step_seconds=0.5, data_seconds=seconds, repeats=1)
        profile.add(FOUR, compute_seconds=0.3, step_seconds=seconds, data_seconds=0.0, repeats=1)
        row = only(profile)
        assert (row.compute_seconds, row.step_seconds) == pytest.approx((0.3, 0.5))

    def test_waiting_for_data_is_kept_apart(self):
        profile = Profile()
        fill(profile, ALONE, step=0.3, data=0.1)
        assert only(profile).step_seconds == pytest.approx(0.3)

    def test_bad_keys_and_repeats_are_refused(self):
        with pytest.raises(InvalidInput, match="num_nodes is 3"):
            ProfileKey(3, 2, 8.0, "cpu")
        with pytest.raises(InvalidInput, match="local_batch is 0"):
            ProfileKey(1, 2, 0, "cpu")
        with pytest.raises(InvalidInput, match="repeats is 0"):
            Profile().add(ALONE, compute_seconds=None, step_seconds=1.0, data_seconds=0.0, repeats=0)


class TestRows:
    def test_one_replica_alone_computes_all_the_time(self):
        profile = Profile()
        fill(profile, ALONE, step=0.6, repeats=2)
        assert only(profile).compute_seconds == pytest.approx(0.3)
        assert only(profile).step_seconds == pytest.approx(0.3)

    def test_computation_is_borrowed_from_the_same_local_batch(self):
        profile = Profile()
        fill(profile, ALONE, step=0.3)
        fill(profile, FOUR, step=0.5)
        assert profile.observations("h200")[1].compute_seconds == pytest.approx(0.3)
        assert profile.observations("h200")[1].step_seconds == pytest.approx(0.5)

    def test_computation_is_read_off_a_line_through_other_local_batches(self):
        profile = Profile()
        for local_batch in (16.0, 64.0):
            fill(profile, ProfileKey(1, 1, local_batch, "h200"), step=0.1 + 0.01 * local_batch)
        fill(profile, FOUR, step=0.5)
        row = next(row for row in profile.observations("h200") if row.num_gpus == 4)
        assert row.compute_seconds == pytest.approx(0.1 + 0.01 * 32)

    def test_without_any_other_row_a_step_is_taken_as_computation(self):
        profile = Profile()
        fill(profile, FOUR, step=0.5)
        assert only(profile).compute_seconds == pytest.approx(0.5)

    def test_computation_is_not_borrowed_from_another_gpu_type(self):
        profile = Profile()
        fill(profile, ProfileKey(1, 1, 32.0, "t4"), step=0.01)
        fill(profile, FOUR, step=0.5)
        assert only(profile).compute_seconds == pytest.approx(0.5)
        assert only(profile, "t4").num_gpus == 1
        assert profile.observations("cpu") == []

    def test_rows_run_lately_count_for_more_but_old_ones_never_for_nothing(self):
        profile = Profile()
        fill(profile, ALONE, step=0.3)
        fill(profile, FOUR, step=0.5, count=2000)
        alone, four = profile.observations("h200")
        full = 20 / 24, 64 / 68
        assert four.weight == pytest.approx(full[1])
        assert alone.weight == pytest.approx(0.5 * full[0], rel=0.01)
        fill(profile, FOUR, step=0.5, count=50_000)
        assert profile.observations("h200")[0].weight == pytest.approx(0.02 * full[0])

    def test_local_batches_need_not_be_whole(self):
        profile = Profile()
        fill(profile, ProfileKey(1, 3, 10 / 3, "h200"), step=0.5)
        assert only(profile).local_batch == pytest.approx(3.3333, rel=1e-4)

    def test_the_keys_used_last_are_kept(self):
        profile = Profile()
        for local_batch in range(1, 200):
            fill(profile, ProfileKey(1, 1, float(local_batch), "h200"), step=0.1, count=1)
        assert len(profile.keys) == 128
        assert min(key.local_batch for key in profile.keys) == 72.0

    def test_a_fit_finds_the_law_behind_the_rows(self):
        truth = PublishedThroughput(0.02, 0.001, 0.05, 0.002, 0.01, 0.001, 1.6)
        profile, rng = Profile(), random.Random(0)
        for nodes, replicas in ((1, 1), (1, 2), (1, 4), (2, 8), (4, 16)):
            for local_batch in (16.0, 64.0, 128.0):
                for index in range(40):
                    repeats = 1 + index % 2
                    compute = truth.compute_seconds(local_batch)
                    step = truth.step_seconds(nodes, replicas, local_batch, repeats - 1)
                    noise = rng.uniform(0.97, 1.03) * (8.0 if index % 11 == 0 else 1.0)
                    profile.add(
                        ProfileKey(nodes, replicas, local_batch, "h200"),
                        compute_seconds=compute * noise if repeats > 1 else None,
                        step_seconds=step * noise,
                        data_seconds=0.0,
                        repeats=repeats,
                    )
        found = fit(profile.observations("h200")).parameters
        assert found is not None
        for nodes, replicas, local_batch in ((1, 1, 32.0), (1, 3, 100.0), (3, 12, 64.0)):
            predicted = found.step_seconds(nodes, replicas, local_batch, 1)
            assert predicted == pytest.approx(truth.step_seconds(nodes, replicas, local_batch, 1), rel=0.05)


class TestState:
    def test_a_profile_goes_on_after_json(self):
        profile = Profile()
        fill(profile, ALONE, step=0.3)
        fill(profile, FOUR, step=0.5, compute=0.2, repeats=2)
        other = Profile()
        other.load_state_dict(json.loads(json.dumps(profile.state_dict(), allow_nan=False)))
        assert other.observations("h200") == profile.observations("h200")
        assert other.state_dict() == profile.state_dict()

    def test_it_warms_up_after_loading(self):
        profile = Profile()
        fill(profile, ALONE, step=0.3)
        other = Profile()
        other.load_state_dict(profile.state_dict())
        fill(other, ALONE, step=30.0, count=0)
        assert other.observations("h200")[0].step_seconds == pytest.approx(0.3)

    def test_another_version_is_refused(self):
        with pytest.raises(CheckpointMismatch, match="version 7"):
            Profile().load_state_dict({"version": 7})


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=80))
def test_a_cost_lies_within_what_was_seen(times):
    profile = Profile()
    fill(profile, ALONE, step=1.0, count=0)
    for seconds in times:
        profile.add(ALONE, compute_seconds=None, step_seconds=seconds, data_seconds=0.0, repeats=1)
    assert min(times) * (1 - 1e-9) <= only(profile).step_seconds <= max(times) * (1 + 1e-9)
