import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.state import State
from pollux.agent.data.loader import LoaderOptions
from pollux.agent.data.step_shape import StepShape
from pollux.agent.data.torch_reader import torch_loader
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup, is_loss
from pollux.agent.elastic import generation_move as module
from pollux.agent.elastic import peer_connections
from pollux.agent.elastic.generation_move import JobLost, NotNeeded
from pollux.agent.elastic.member import ElasticMember, refuse_all
from pollux.agent.elastic.member_states import Joining, Regrouping
from pollux.agent.elastic.membership import Membership
from pollux.agent.elastic.pause import ResizePause
from pollux.agent.elastic.step_requests import CHECKPOINT, RESIZE, STOP, StepRequests
from pollux.core.errors import CheckpointMismatch
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live.keys import PREFIX
from pollux.wire.live.plan import GenerationPlan, PlanDeadlines, PlanMember


class Job:
    """What a job does in a change, written down."""

    def __init__(self, objects: dict[str, object] | None = None):
        self.calls: list[str] = []
        self.objects = objects or {}

    def position(self):
        return (3, 0, 0, 36)

    def local_state(self, whole):
        self.calls.append("whole" if whole else "values")
        return State()

    def state_to_send(self):
        return State(objects=self.objects)

    def rebuild(self, state, receives):
        self.calls.append(f"rebuild {state.values['num_replicas']}")

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.05)
    store = dist.HashStore()
    return ElasticMember(Membership(store, 0, 0), ReplicaGroup(Environment(), torch.device("cpu")), joins=False)


def keys(live: ElasticMember) -> Any:
    return dist.PrefixStore(PREFIX, live.membership.store)


def publish(live: ElasticMember, generation: int, *was: int | None, before: int = 0) -> None:
    members = tuple(PlanMember(rank, old) for rank, old in enumerate(was))
    keys(live).set(
        f"plan/{generation}", GenerationPlan(generation, before, members, deadlines=PlanDeadlines(join=0.05)).encode()
    )
    keys(live).set("committed", str(generation))


def test_a_change_to_one_replica_needs_no_group(live):
    job = Job()
    publish(live, 1, 0)
    assert live.wanted_generation() == 1
    live.resize(job, 1)
    assert job.calls == ["merge_parts", "disconnect", "values", "rebuild 1"]
    assert live.membership.generation == 1
    assert live.wanted_generation() is None
    assert live.stepped(4)
    assert not live.stepped(5)
    report = __import__("json").loads(keys(live).get("done/1/0"))
    assert (report["kind"], report["step"]) == ("move", 4)
    assert sum(report["parts"].values()) == pytest.approx(report["pause_seconds"])


def test_a_door_that_does_not_open_means_a_restart_after_saving(live):
    job = Job()
    publish(live, 1, 0, None)
    with pytest.raises(JobLost) as ended:
        live.resize(job, 1)
    assert ended.value.code == 75
    assert "save_alone" in job.calls
    assert b"not all replicas came" in keys(live).get("failed/1")


def test_a_state_that_does_not_fit_is_given_up_at_once(live):
    job: Any = Job()

    def rebuild(state, receives):
        raise CheckpointMismatch("a buffer is another one here")

    job.rebuild = rebuild
    publish(live, 1, 0)
    with pytest.raises(JobLost):
        live.resize(job, 1)
    assert b"does not fit a replica: a buffer is another one here" in keys(live).get("failed/1")
    assert "save_alone" not in job.calls, "the others hold the whole state"


def test_a_newer_plan_is_followed_from_the_door(live):
    job = Job()
    publish(live, 1, 0, None)
    module.at_phase = lambda phase, rank: publish(live, 2, 0) if phase == "door" else None
    try:
        live.resize(job, 1)
    finally:
        module.at_phase = module._nothing
    assert live.membership.generation == 2
    assert job.calls[-1] == "rebuild 1"


def withdraw_at(live: ElasticMember, phase: str, generation: int = 1) -> Any:
    def happens(now: str, rank: int) -> None:
        if now == phase:
            keys(live).set(f"withdrawn/{generation}", "nobody came")

    return happens


def test_a_change_that_is_withdrawn_before_all_are_at_the_door_leaves_replicas_where_they_are(live, monkeypatch):
    job = Job()
    publish(live, 1, 0, None)
    monkeypatch.setattr(module, "at_phase", withdraw_at(live, "door"))
    live.beat.busy = ""
    live.resize(job, 1)
    assert job.calls == ["merge_parts"], "nobody has let go of anything"
    assert live.membership.generation == 0
    assert live.wanted_generation() is None
    assert live.beat.busy == ""
    assert not live.stepped(4)
    publish(live, 2, 0)
    live.resize(job, 2)
    assert live.membership.generation == 2


def test_a_door_that_opened_stays_open_for_all(live, monkeypatch):
    publish(live, 1, 0)
    monkeypatch.setattr(module, "at_phase", withdraw_at(live, "door"))
    live.resize(Job(), 1)
    assert live.membership.generation == 1, "all were there"
    assert keys(live).get("door/1") == b"open"


def test_a_door_that_was_shut_stays_shut_for_who_comes_later(live):
    publish(live, 1, 0)
    keys(live).set("withdrawn/1", "nobody came")
    keys(live).set("door/1", "shut")
    live.resize(Job(), 1)
    assert live.membership.generation == 0


def test_who_was_to_leave_stays_where_the_change_is_withdrawn(live, monkeypatch):
    job = Job()
    publish(live, 1, None)
    monkeypatch.setattr(module, "at_phase", withdraw_at(live, "leave"))
    monkeypatch.setattr(module.os, "_exit", lambda code: pytest.fail("it left"))
    live.resize(job, 1)
    assert job.calls == ["merge_parts"]


def hand_over(live: ElasticMember) -> None:
    """Have replica 0 send what it holds to one that joins, and leave."""
    plan = GenerationPlan(1, 0, (PlanMember(0, None),), deadlines=PlanDeadlines(join=0.05, transfer=0.05), senders=(0,))
    keys(live).set("plan/1", plan.encode())
    keys(live).set("committed", "1")


@pytest.fixture
def alone(live, monkeypatch):
    """Where this replica meets another that is none: the state counts as sent."""
    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise NotNeeded

    monkeypatch.setattr(live._replicas, "connect", lambda *arguments: keys(live).set("connected", str(arguments[:2])))
    monkeypatch.setattr(live.move, "_transfer", lambda *arguments: (False, State()))
    monkeypatch.setattr(module.os, "_exit", leave)
    hand_over(live)
    keys(live).set("here/1/0", "")
    return left


def test_who_hands_over_leaves_when_it_is_told_that_nobody_needs_it(live, alone):
    keys(live).set("received/1/0", "")
    keys(live).set("handed/1", "")
    with pytest.raises(NotNeeded):
        live.resize(Job(), 1)
    assert alone == [0]
    assert keys(live).get("connected") == b"(1, 2)", "numbered after those that join"


@pytest.mark.parametrize("come", ["", "received/1/0"])
def test_who_hands_over_keeps_its_state_until_then(live, alone, come):
    job = Job()
    if come:
        keys(live).set(come, "")
    with pytest.raises(JobLost):
        live.resize(job, 1)
    assert alone == []
    assert job.calls[-1] == "save_alone"


@pytest.mark.parametrize("come", ["", "received/1/0"])
def test_who_hands_over_and_is_asked_to_stop_saves(live, alone, come):
    job = Job()
    live.move.stop_wanted = lambda: bool(keys(live).check(["here/1/1"]))
    if come:
        keys(live).set(come, "")
    with pytest.raises(JobLost) as ended:
        live.resize(job, 1)
    assert (ended.value.code, job.calls[-1]) == (143, "save_alone")


def test_who_joins_counts_the_pause_of_those_that_trained(live, monkeypatch):
    class Two(ReplicaGroup):
        def gather(self, numbers):
            return [list(numbers), [3.0, 0.0, 0.0, 36.0]]

    live.move._replicas = Two(Environment(), torch.device("cpu"))
    state = State(values={"num_replicas": 1, "paused_seconds": 0.25})
    monkeypatch.setattr(module, "exchange", lambda *arguments: (state, 7))
    plan = GenerationPlan(1, 0, (PlanMember(0, None),), senders=(0,))
    # It has waited for long until the others came to a boundary.
    began = module.time.perf_counter() - 100.0
    pause = ResizePause(plan, "grow", began, last=began)
    pause.end_part("regroup")
    assert live.move._transfer(Job(), Regrouping(plan, Joining(), began, 1), pause) == (True, state)
    pause.end_part("transfer")
    assert pause.parts["regroup"] == pytest.approx(0.25)
    assert sum(pause.parts.values()) == pytest.approx(pause.last - pause.began)


def test_who_has_lost_others_on_the_way_out_cannot_stay(live, monkeypatch):
    class Broken(Job):
        def merge_parts(self, same_size, first_leaves):
            raise RuntimeError("/gloo/ closed by peer")

    job: Any = Broken()
    publish(live, 1, 0, None)
    monkeypatch.setattr(module, "at_phase", withdraw_at(live, "door"))
    with pytest.raises(JobLost):
        live.resize(job, 1)
    assert "save_alone" in job.calls


def test_a_joiner_whose_change_is_withdrawn_at_the_door_ends_well(live, monkeypatch):
    joiner = ElasticMember(Membership(live.membership.store, 1, 1), live._replicas, joins=True)
    publish(live, 1, 0, None)
    monkeypatch.setattr(module, "at_phase", withdraw_at(live, "door"))
    with pytest.raises(NotNeeded):
        joiner.join(Job())


@pytest.mark.parametrize(("was", "leaves"), [((0, 1), False), ((1,), True)])
def test_the_others_hear_that_replica_0_leaves(was, leaves):
    asked = []

    class Leaving(Job):
        def merge_parts(self, same_size, first_leaves):
            asked.append((same_size, first_leaves))
            raise ValueError("enough")

    live = ElasticMember(
        Membership(dist.HashStore(), 0, 1), ReplicaGroup(Environment(), torch.device("cpu")), joins=False
    )
    publish(live, 1, *was)
    with pytest.raises(ValueError, match="enough"):
        live.resize(Leaving(), 1)
    assert asked == [(len(was) == 1, leaves)]


class Ends:
    """What is cut, noted."""

    def __init__(self, monkeypatch, live: ElasticMember, count: int = 1):
        self.cuts: list[frozenset[str]] = []
        self.live = live
        self.count = count
        monkeypatch.setattr(peer_connections, "cut", self.cut)
        monkeypatch.setattr(peer_connections, "_FREE_SECONDS", 0.0)
        live.move.connections._published = (0, 2)
        keys(live).set("ends/0/0", '["127.0.0.1 7"]')

    def cut(self, ends: frozenset[str]) -> int:
        self.cuts.append(ends)
        return self.count

    def look(self) -> None:
        for _ in range(3):
            self.live.free_from_lost()


def test_who_is_lost_is_cut_off_once(live, monkeypatch):
    ends = Ends(monkeypatch, live)
    ends.look()
    assert ends.cuts == []
    keys(live).set("lost/0", "[1]")
    ends.look()
    assert ends.cuts == [frozenset({"127.0.0.1 7"})]


def test_nothing_is_cut_any_more_where_the_training_thread_is_free(live, monkeypatch):
    ends = Ends(monkeypatch, live)
    keys(live).set("lost/0", "[1]")
    monkeypatch.setattr(module, "at_phase", lambda phase, rank: ends.look() if phase in ("door", "transfer") else None)
    publish(live, 1, 0)
    live.recover(Job(), "gone")
    assert ends.cuts == []


@pytest.mark.parametrize(("possible", "says"), [(True, "is known here"), (False, "setdefaulttimeout")])
def test_that_nothing_could_be_cut_is_told(live, monkeypatch, caplog, possible, says):
    ends = Ends(monkeypatch, live, count=0)
    monkeypatch.setattr(peer_connections, "is_possible", lambda: possible)
    keys(live).set("lost/0", "[1]")
    ends.look()
    assert says in caplog.text


def test_without_a_plan_after_a_loss_the_job_is_saved_and_restarted(live):
    job = Job()
    with pytest.raises(JobLost) as ended:
        live.recover(job, "gone")
    assert ended.value.code == 75
    assert job.calls == ["disconnect", "drop_unfinished_step", "save_alone"]
    assert keys(live).get("failed/0") == b"gone"


def test_a_request_to_stop_ends_the_wait_for_a_plan(live):
    job = Job()
    watch = StepRequests(live._replicas, None, ())
    watch.request(STOP)
    live.attach(job, watch)
    with pytest.raises(JobLost) as ended:
        live.recover(job, "gone")
    assert ended.value.code == 143
    assert job.calls[-1] == "save_alone"
    assert not keys(live).check(["failed/0"])


def test_only_the_first_that_is_left_saves(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)
    for lost, saves in (([], False), ([0], True)):
        live = ElasticMember(
            Membership(dist.HashStore(), 0, 1), ReplicaGroup(Environment(), torch.device("cpu")), joins=False
        )
        keys(live).set("lost/0", str(lost))
        job = Job()
        with pytest.raises(JobLost):
            live.recover(job, "gone")
        assert ("save_alone" in job.calls) == saves


def test_a_request_to_stop_is_heard_at_the_door(live):
    job, watch = Job(), StepRequests(live._replicas, None, ())
    live.attach(job, watch)
    members = (PlanMember(0, 0), PlanMember(1, None))
    keys(live).set("plan/1", GenerationPlan(1, 0, members, deadlines=PlanDeadlines(join=300.0)).encode())
    keys(live).set("committed", "1")
    module.at_phase = lambda phase, rank: watch.request(STOP) if phase == "door" else None
    try:
        with pytest.raises(JobLost) as ended:
            live.resize(job, 1)
    finally:
        module.at_phase = module._nothing
    assert ended.value.code == 143
    assert job.calls[-1] == "save_alone"


def test_a_pause_ends_where_no_step_follows_but_code_of_the_users_own(live):
    publish(live, 1, 0)
    live.resize(Job(), 1)
    live.start_activity("pass end")
    assert keys(live).check(["done/1/0"])
    assert live.beat.busy == "pass end"
    assert not live.stepped(5)


def test_that_the_job_is_through_is_told_at_once(live):
    live.send_heartbeat()
    live.finish()
    assert __import__("json").loads(keys(live).get("beat/0/0"))["activity"] == "finished"


def test_without_its_store_a_job_stays_where_it_is(live, monkeypatch):
    job = Job()
    monkeypatch.setattr(live.membership, "plan", lambda generation: (_ for _ in ()).throw(RuntimeError("reset")))
    live.resize(job, 1)
    assert job.calls == []


def test_beats_tell_why_a_job_cannot_move(live):
    live.refusal = "sharded"
    live.send_heartbeat()
    assert __import__("json").loads(keys(live).get("beat/0/0"))["refusal"] == "sharded"


@pytest.mark.parametrize("how", ["withdrawn", "overtaken"])
def test_a_joiner_that_is_not_needed_ends_well(live, how):
    joiner = ElasticMember(Membership(live.membership.store, 5, 1), live._replicas, joins=True)
    if how == "withdrawn":
        keys(live).set("withdrawn/5", "late")
    else:
        publish(live, 6, 0)
    with pytest.raises(NotNeeded) as ended:
        joiner.join(Job())
    assert ended.value.code == 0
    assert keys(live).check(["ready/5/1"])


def test_state_that_cannot_travel_is_refused_once(live, caplog):
    live.attach(Job({"object.mine": object()}), StepRequests(live._replicas, None, ()))
    publish(live, 1, 0, None)
    assert not live.can_move(1)
    assert b"object.mine is a object" in keys(live).get("failed/1")
    assert live.wanted_generation() is None
    publish(live, 2, 0, None)
    assert not live.can_move(2)
    assert len([record for record in caplog.records if "no change of replicas" in record.message]) == 1


def test_jobs_of_frameworks_answer_every_generation(live):
    thread = refuse_all(live.membership, "not here")
    publish(live, 3, 0)
    keys(live).wait(["failed/3"])
    assert keys(live).get("failed/3") == b"not here"
    assert thread.daemon


def test_losses_are_told_from_errors_of_the_script():
    assert is_loss(RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert is_loss(dist.DistBackendError("NCCL error"))
    assert not is_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
    assert not is_loss(ValueError("/gloo/"))


class ResizeSource:
    def __init__(self, target: int | None = 7, agrees: bool = True):
        self.target, self.can, self.asked = target, agrees, 0

    def send_heartbeat(self):
        pass

    def free_from_lost(self):
        pass

    def wanted_generation(self):
        self.asked += 1
        return self.target

    def can_move(self, generation):
        return self.can


def watched(mover: ResizeSource) -> Any:
    watch = StepRequests(ReplicaGroup(Environment(), torch.device("cpu")), None, (), mover=mover)
    watch._closed.set()
    return watch


@pytest.mark.parametrize(
    ("requested", "mover", "served"),
    [
        ({RESIZE}, ResizeSource(), {RESIZE}),
        ({RESIZE, CHECKPOINT}, ResizeSource(), {RESIZE, CHECKPOINT}),
        ({RESIZE, STOP}, ResizeSource(), {STOP}),
        ({RESIZE}, ResizeSource(agrees=False), set()),
        ({RESIZE}, ResizeSource(target=None), set()),
    ],
)
def test_a_resize_is_served_unless_something_speaks_against_it(requested, mover, served):
    watch = watched(mover)
    for what in requested:
        watch.request(what)
    assert watch.at_boundary(3) == served
    assert not watch.armed
    assert (watch.target == 7) == (RESIZE in served)


def test_a_lone_replica_whose_store_is_gone_trains_on(monkeypatch):
    mover = ResizeSource()
    watch = watched(mover)
    monkeypatch.setattr(mover, "wanted_generation", lambda: (_ for _ in ()).throw(RuntimeError("reset")))
    watch.request(RESIZE)
    watch.request(CHECKPOINT)
    assert watch.at_boundary(3) == {CHECKPOINT}


def test_several_replicas_without_a_store_stop_as_after_a_loss(monkeypatch):
    watch = watched(ResizeSource())
    monkeypatch.setattr(watch._replicas, "num_replicas", 2)
    monkeypatch.setattr(watch, "_agree", lambda step: (_ for _ in ()).throw(RuntimeError("reset")))
    watch.request(CHECKPOINT)
    assert watch.at_boundary(3) == set()
    watch.request(STOP)
    with pytest.raises(dist.DistError, match="asked to stop"):
        watch.at_boundary(4)


def test_an_ordinary_step_asks_nobody():
    mover = ResizeSource()
    watch = watched(mover)
    watch._thread.join(PATIENCE_SECONDS)
    before = mover.asked
    watch._wanted.clear()
    watch.armed = False
    assert [watch.at_boundary(step) for step in range(100)] == [set()] * 100
    assert mover.asked == before


def test_requests_outlive_a_regroup_but_for_the_resize():
    watch = watched(ResizeSource())
    watch._thread.join(PATIENCE_SECONDS)
    watch.request(RESIZE)
    watch.request(STOP)
    watch.start_among_new_replicas()
    assert watch.wants(STOP)
    assert not watch.wants(RESIZE)
    assert watch.armed


def test_a_ledger_is_rebuilt_from_the_order():
    data = torch.utils.data.TensorDataset(torch.arange(50))
    whole, half = (torch_loader(data, LoaderOptions(), 0, count) for count in (1, 2))
    for loader in (whole, half):
        run = loader.micro_batches(lambda step: StepShape(10, 1), 0)
        for _ in range(3):
            next(run)
            loader.commit()
    assert half.ledger.count == 15
    half.rebuild_ledger()
    assert half.ledger == whole.ledger
    assert half.state_dict()["ledger"]["count"] == 30


def test_the_folder_of_checkpoints_goes_to_whoever_is_replica_0(tmp_path):
    first = Checkpointer(tmp_path)
    second: Any = Checkpointer(tmp_path, replica=1, opens=False)
    second.rebind(0, 1, None)
    closing = threading.Timer(0.1, first.close)
    closing.start()
    second.save(1, State({"model.w": torch.ones(2)}, {}, {}), {}, wait=True)
    closing.join()
    assert second.last_error is None
    assert second.latest().manifest.step == 1
    second.rebind(1, 2, None)
    again = Checkpointer(tmp_path)
    again.close()
    second.close()
