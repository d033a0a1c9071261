from __future__ import annotations

from dataclasses import replace

import pytest

from pollux import policies
from pollux.core import Node, Queue
from pollux.core.errors import (
    Conflict,
    IllegalTransition,
    InvalidInput,
    PolluxError,
    StoreFailed,
    UnknownName,
    Unreachable,
)
from pollux.service import Engine, ServiceSettings
from pollux.service.engine.job_ids import JobIds
from pollux.store import MemoryStore, MemoryTelemetry, SavedState
from pollux.testing.servers.service import SAMPLE_MODEL, FakeBackend, ManualClock, result_of, sample_report
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.job import BatchSizes, JobRequest


def test_a_submitted_job_is_placed_and_launched(world):
    job_id = world.submit()
    assert job_id == "job"
    (launch,) = world.backend.launches
    assert (launch.job_id, launch.generation, launch.argv) == ("job", 1, ("sleep", "1"))
    assert world.engine.job("job").state == "starting"
    world.backend.started("job")
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").state == "running"


def test_a_job_is_told_its_variables(world):
    world.submit(env={"SEED": "1"})
    env = world.backend.launches[0].env
    assert env["SEED"] == "1"
    assert env["POLLUX_JOB"] == "job"
    assert env["POLLUX_GENERATION"] == "1"
    assert env["POLLUX_URL"] == "http://127.0.0.1:1"
    assert env["POLLUX_JOB_TOKEN"] == world.tokens.for_job("job")
    assert env["POLLUX_CHECKPOINT_DIR"] == str(world.home / "checkpoints" / "job")
    assert "POLLUX_STOPPED_AT" not in env


def test_a_job_that_ends_well_has_succeeded_and_is_forgotten(world):
    world.submit()
    world.backend.started("job")
    world.backend.ended("job", "succeeded")
    world.engine.loop.wait_until_idle()
    status = world.engine.job("job")
    assert (status.state, status.progress, status.gpus) == ("succeeded", 1.0, 0)
    assert world.backend.forgotten == ["job"]


def test_a_crash_is_retried_after_a_pause_and_then_fails(world):
    world.submit(retries=1)
    world.backend.ended("job", "crashed", "exit code 3")
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").state == "queued"
    world.after(1.0)
    assert len(world.backend.launches) == 1
    world.after(5.0)
    assert [launch.generation for launch in world.backend.launches] == [1, 3]
    world.backend.ended("job", "crashed", "exit code 3")
    world.engine.loop.wait_until_idle()
    status = world.engine.job("job")
    assert (status.state, status.crashes) == ("failed", 2)
    assert "exit code 3" in status.detail


def test_a_launch_that_the_backend_refuses_counts_as_a_crash(world):
    world.backend.refuse = "no such interpreter"
    world.submit(retries=0)
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").state == "failed"
    assert "no such interpreter" in world.engine.job("job").detail


def test_out_of_memory_limits_the_next_local_batch(world):
    world.submit(max_gpus=1)
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, local_batch=64)))
    world.backend.ended("job", "out-of-memory")
    world.engine.loop.wait_until_idle()
    world.after(10.0)
    assert world.backend.launches[-1].env["POLLUX_MAX_LOCAL_BATCH"] == "32"


def test_a_second_job_makes_the_first_shrink(world):
    world.submit("a", min_gpus=1, max_gpus=4)
    world.backend.started("a")
    result_of(world.engine.report("a", sample_report(1, model=SAMPLE_MODEL)))
    world.after(10.0)
    world.submit("b", min_gpus=2, max_gpus=2)
    world.after(10.0)
    assert world.engine.job("a").gpus + world.engine.job("b").gpus <= 4
    assert world.engine.job("b").gpus == 2
    again = [launch for launch in world.backend.launches if launch.job_id == "a"][1:]
    assert all(float(launch.env["POLLUX_STOPPED_AT"]) >= 1000.0 for launch in again)


def test_the_older_generation_is_told_to_stop_before_the_new_one_starts(make_world):
    world = make_world(gpus=2)
    world.submit("a", min_gpus=1, max_gpus=2)
    world.backend.started("a")
    result_of(world.engine.report("a", sample_report(1, model=SAMPLE_MODEL)))
    world.after(10.0)
    before = world.engine.job("a").generation
    result_of(world.engine.resize("a", 1, 1)) if world.engine.job("a").gpus == 2 else result_of(
        world.engine.resize("a", 2, 2)
    )
    world.after(10.0)
    assert world.engine.job("a").generation == before + 1
    assert ("a", before) in world.backend.stops


def test_names_of_jobs_that_have_ended_get_a_number(world):
    assert world.submit("x") == "x"
    with pytest.raises(Conflict, match="cancel"):
        world.submit("x")
    result_of(world.engine.cancel("x"))
    assert world.submit("x") == "x-2"
    with pytest.raises(Conflict, match="x-2"):
        world.submit("x")


def test_a_job_is_cancelled_once(world):
    world.submit()
    assert result_of(world.engine.cancel("job")).state == "cancelled"
    assert world.backend.stops == [("job", 2)]
    with pytest.raises(IllegalTransition):
        result_of(world.engine.cancel("job"))
    with pytest.raises(UnknownName, match="known: job"):
        result_of(world.engine.cancel("jub"))


def test_pause_and_resume(world):
    world.submit()
    assert result_of(world.engine.pause("job")).state == "paused"
    with pytest.raises(IllegalTransition, match="paused already; 'pollux resume job'"):
        result_of(world.engine.pause("job"))
    result_of(world.engine.resume("job"))
    world.after(5.0)
    assert world.engine.job("job").state == "starting"
    with pytest.raises(IllegalTransition, match="job 'job' is starting, not paused"):
        result_of(world.engine.resume("job"))
    result_of(world.engine.cancel("job"))
    with pytest.raises(IllegalTransition, match="ended"):
        result_of(world.engine.pause("job"))


def test_resize_below_one_changes_nothing(world):
    world.submit()
    before = world.store.revision
    with pytest.raises(InvalidInput):
        result_of(world.engine.resize("job", 0, 4))
    with pytest.raises(InvalidInput):
        result_of(world.engine.resize("job", 3, 2))
    assert world.store.revision == before
    assert result_of(world.engine.resize("job", 2, 3)).min_gpus == 2


def test_the_same_key_submits_once(world):
    job = JobRequest("k", ("true",), workdir=str(world.home))
    first = result_of(world.engine.submit(job, "key-1"))[0]
    again = result_of(world.engine.submit(job, "key-1"))[0]
    assert first.id == again.id == "k"
    with pytest.raises(Conflict, match="key"):
        result_of(world.engine.submit(JobRequest("other", ("true",), workdir=str(world.home)), "key-1"))
    assert [status.id for status in world.engine.jobs()] == ["k"]


def test_a_key_that_was_written_without_its_job_still_submits(world):
    job = JobRequest("k", ("true",), workdir=str(world.home))
    world.engine._job_ids.of_submission(job, "key-1", {})
    assert result_of(world.engine.submit(job, "key-1"))[0].id == "k"


def test_a_key_whose_job_was_refused_never_leads_to_the_job_of_another(world):
    refused = JobRequest("k", ("true",), workdir=str(world.home), after=("nobody",))
    with pytest.raises(PolluxError):
        result_of(world.engine.submit(refused, "key-1"))
    other = result_of(world.engine.submit(JobRequest("k", ("false",), workdir=str(world.home))))[0]
    with pytest.raises(Conflict, match="'k'"):
        result_of(world.engine.submit(JobRequest("k", ("true",), workdir=str(world.home)), "key-1"))
    result_of(world.engine.cancel(other.id))
    mine = result_of(world.engine.submit(JobRequest("k", ("true",), workdir=str(world.home)), "key-1"))[0]
    assert mine.id != other.id
    assert result_of(world.engine.submit(JobRequest("k", ("true",), workdir=str(world.home)), "key-1"))[0].id == mine.id


def test_a_plan_changes_nothing(world):
    before = world.store.revision
    plan = result_of(world.engine.plan(JobRequest("p", ("true",), 1, 4, workdir=str(world.home))))
    assert plan.starts_now
    assert 1 <= plan.gpus <= 4
    assert plan.text
    assert world.store.revision == before
    assert world.engine.jobs() == ()


def test_reports_that_are_no_news_are_measurements_only(world):
    world.submit()
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, model=SAMPLE_MODEL)))
    world.after(10.0)
    generation = world.engine.job("job").generation
    result_of(world.engine.report("job", sample_report(generation, progress=200.0, model=SAMPLE_MODEL)))
    world.after(10.0)
    before = world.store.revision
    reply = result_of(world.engine.report("job", sample_report(generation, progress=201.0, model=SAMPLE_MODEL)))
    world.engine.loop.wait_until_idle()
    assert world.store.revision == before
    assert reply.report_every_seconds == 30.0
    assert len(world.telemetry.series("job", "report")) == 3
    status = world.engine.job("job")
    assert status.batch_size == 128
    assert status.progress == pytest.approx(0.201)
    assert status.eta is not None
    assert status.eta.low < status.eta.high


def test_reports_that_cannot_be_are_refused(world):
    world.submit()
    with pytest.raises(Conflict, match="generation 7"):
        result_of(world.engine.report("job", sample_report(7)))
    with pytest.raises(InvalidInput, match="version"):
        result_of(world.engine.report("job", sample_report(1, version=9)))
    with pytest.raises(InvalidInput, match="step"):
        result_of(world.engine.report("job", sample_report(1, step=-1)))
    with pytest.raises(UnknownName):
        result_of(world.engine.report("nobody", sample_report(1)))
    assert world.telemetry.series("job", "report") == []


def test_intervals_are_scored_when_the_job_ends(world):
    world.submit(max_gpus=1)
    world.backend.started("job")
    for share in (0.1, 0.3, 0.6):
        result_of(world.engine.report("job", sample_report(1, progress=share * 1000, model=SAMPLE_MODEL)))
        world.after(30.0)
    world.backend.ended("job", "succeeded")
    world.engine.loop.wait_until_idle()
    assert world.engine.views.etas.quality("job")["predictions"] == 3
    assert world.engine.views.etas.overall()["jobs"] == 1


def test_fixed_policies_keep_the_batch(make_world):
    world = make_world(policy="fifo")
    world.submit(batch_size=BatchSizes(64, 512))
    assert world.backend.launches[0].env["POLLUX_ADAPT"] == "0"
    other = make_world(policy="pollux")
    other.submit(batch_size=BatchSizes(64, 512))
    assert other.backend.launches[0].env["POLLUX_MAX_BATCH_SIZE"] == "512"
    assert "POLLUX_ADAPT" not in other.backend.launches[0].env


def test_a_policy_that_needs_an_oracle_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="oracle"):
        Engine(
            policies.create("optimus-oracle"), FakeBackend([]), MemoryStore(), MemoryTelemetry(),
            ServiceSettings(home=tmp_path),
        )  # fmt: skip


class FullDisk(MemoryStore):
    full = False

    def append(self, events):
        if self.full:
            raise StoreFailed("disk full")
        return super().append(events)


def test_what_cannot_be_written_did_not_happen(make_world):
    store = FullDisk()
    world = make_world(store=store)
    world.submit("a")
    store.full = True
    with pytest.raises(StoreFailed):
        result_of(world.engine.submit(JobRequest("b", ("x",), workdir="/")))
    with pytest.raises(StoreFailed):
        result_of(world.engine.cancel("a"))
    assert [status.id for status in world.engine.jobs()] == ["a"]
    assert world.engine.job("a").state == "starting"
    assert world.backend.stops == []
    store.full = False
    assert result_of(world.engine.cancel("a")).state == "cancelled"


class Stumbling:
    name = "stumbling"
    needs: frozenset[str] = frozenset()
    batch = "adaptive"

    def __init__(self):
        self.broken = True
        self.real = policies.create("fifo")

    def allocate(self, snapshot):
        if self.broken:
            raise RuntimeError("a mistake")
        return self.real.allocate(snapshot)


def test_a_policy_that_fails_holds_nobody_up(tmp_path, caplog):
    clock, policy = ManualClock(5.0), Stumbling()
    backend = FakeBackend([Node("n", 2)], clock)
    engine = Engine(policy, backend, MemoryStore(), MemoryTelemetry(), ServiceSettings(home=tmp_path), clock)  # type: ignore[arg-type]
    engine.start()
    engine.loop.wait_until_idle()
    assert "failed" in caplog.text
    policy.broken = False
    clock.set(10.0, engine)
    result_of(engine.submit(JobRequest("a", ("x",), workdir="/")))
    engine.loop.wait_until_idle()
    assert engine.job("a").state == "starting"
    policy.broken = True
    clock.set(20.0, engine)
    caplog.clear()
    engine.set_queue(Queue("q")).result(PATIENCE_SECONDS)
    engine.loop.wait_until_idle()
    assert "failed" in caplog.text
    assert engine.job("a").state == "starting"
    engine.stop("keep")


def test_queues_are_set_and_seen(world):
    status = world.engine.set_queue(Queue("vision", 2.0, 3)).result(PATIENCE_SECONDS)
    assert (status.weight, status.gpu_quota) == (2.0, 3)
    world.submit(queue="vision", max_gpus=4)
    world.after(5.0)
    (queue,) = [found for found in result_of(world.engine.status()).queues if found.name == "vision"]
    assert 1 <= queue.used <= 3


def test_nodes_come_and_go(world):
    world.submit(min_gpus=6, max_gpus=6)
    assert world.backend.launches == []
    world.backend.node_up(Node("node-1", 4, "cpu"))
    world.after(5.0)
    assert world.engine.job("job").gpus == 6
    world.backend.node_down("node-1")
    world.after(5.0)
    assert world.engine.job("job").state == "queued"
    assert [node.id for node in result_of(world.engine.status()).nodes] == ["node-0"]


def test_jobs_wait_for_others(world):
    world.submit("first", max_gpus=1)
    world.submit("second", max_gpus=1, after=("first",))
    assert [launch.job_id for launch in world.backend.launches] == ["first"]
    with pytest.raises(UnknownName):
        world.submit("third", after=("nobody",))
    world.backend.ended("first", "succeeded")
    world.after(5.0)
    assert [launch.job_id for launch in world.backend.launches] == ["first", "second"]


def test_a_dependent_of_a_cancelled_job_is_shown_as_failed(world):
    world.submit("first", max_gpus=1)
    world.submit("second", max_gpus=1, after=("first",))
    result_of(world.engine.cancel("first"))
    assert world.engine.job("second").state == "failed"


def test_a_time_limit_ends_a_job(world):
    world.submit(time_limit_seconds=100.0)
    world.backend.started("job")
    world.after(90.0)
    assert world.engine.job("job").state == "running"
    world.after(11.0)
    assert world.engine.job("job").state == "failed"
    assert ("job", 2) in world.backend.stops


def test_snapshots_are_kept_and_facts_trimmed(world):
    for number in range(3):
        world.submit(f"j{number}", max_gpus=1)
    world.engine.pipeline.save()
    saved = world.store.load()
    assert isinstance(saved, SavedState)
    assert saved.revision == world.store.revision
    world.after(700.0)
    world.engine.set_queue(Queue("q")).result(PATIENCE_SECONDS)
    world.after(700.0)
    assert world.store.load().revision == world.store.revision


def test_an_engine_that_has_stopped_says_so(world):
    world.engine.stop("keep")
    with pytest.raises(Unreachable):
        result_of(world.engine.cancel("job"))


def test_a_story_tells_what_happened(world):
    world.submit()
    world.backend.started("job")
    world.engine.loop.wait_until_idle()
    kinds = [line.kind for line in world.engine.events_of("job")]
    assert kinds == ["submitted", "placed", "running"]


@pytest.mark.parametrize("folder", ["checkpoints", "logs", "receipts"])
def test_a_new_job_inherits_nothing_from_a_forgotten_one_of_its_name(world, folder):
    (world.home / folder / "digits").mkdir(parents=True)
    (world.home / folder / "digits-2").mkdir()
    assert world.submit("digits") == "digits-3"
    assert world.backend.launches[-1].env["POLLUX_CHECKPOINT_DIR"] == str(world.home / "checkpoints" / "digits-3")


def test_the_folder_of_a_job_that_is_there_is_its_own(world):
    world.submit("digits")
    (world.home / "checkpoints" / "digits").mkdir(parents=True)
    with pytest.raises(Conflict, match="'digits' is starting; cancel"):
        world.submit("digits")
    result_of(world.engine.cancel("digits"))
    assert world.submit("digits") == "digits-2"


def test_who_keeps_no_past_goes_on_from_what_is_there(make_world):
    world = make_world()
    world.engine._job_ids = JobIds(world.store, replace(world.engine.settings, store="memory"))
    (world.home / "checkpoints" / "digits").mkdir(parents=True)
    assert world.submit("digits") == "digits"
