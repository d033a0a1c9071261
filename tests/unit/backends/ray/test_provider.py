"""The lender against a process that plays the driver: it says what a file holds, and writes down what it is told."""

import json
import sys
import threading
import time

import pytest

from pollux.backends.ray import driver_client
from pollux.backends.ray.driver_messages import (
    ConnectedMessage,
    DesireNodes,
    DriverOrder,
    FailedMessage,
    FreeClaims,
    GrantedMessage,
    HostGoneMessage,
    HostMessage,
    HostReport,
    NodesMessage,
    ReleaseHosts,
    RetryClaims,
    TakeClaims,
    UnreachableMessage,
    WaitsMessage,
    WellMessage,
    decode_request,
    encode_line,
)
from pollux.backends.ray.nodes import RayNode
from pollux.backends.ray.options import RayOptions
from pollux.backends.ray.provider import RayNodeProvider
from pollux.testing.waiting import PATIENCE_SECONDS

PLAYED = """
import json, sys, threading, time
from pathlib import Path
folder = Path(sys.argv[1])
def listen():
    for line in sys.stdin:
        with (folder / "told").open("a") as file:
            file.write(line)
    import os
    os._exit(0)
threading.Thread(target=listen, daemon=True).start()
said = 0
while True:
    lines = (folder / "said").read_text().splitlines()
    for line in lines[said:]:
        if line == "die":
            (folder / "said").write_text("")
            sys.exit("out of breath")
        print(line, flush=True, file=sys.stderr if line.startswith("log: ") else sys.stdout)
    said = len(lines)
    time.sleep(0.005)
"""


class Stage:
    def __init__(self, folder, **options):
        self.folder = folder
        (folder / "said").touch()
        (folder / "told").touch()
        (folder / "driver.py").write_text(PLAYED)
        self.command = (sys.executable, str(folder / "driver.py"), str(folder))
        self.options = options
        self.changed = threading.Event()
        self.lender = self.begin()

    def begin(self):
        lender = RayNodeProvider(self.folder / "home", RayOptions(**self.options), command=self.command)
        lender.start(b"s" * 16, "127.0.0.1", self.changed.set)
        return lender

    def say(self, *messages):
        """Have the driver send these: messages, or lines for its log, or `die`."""
        with (self.folder / "said").open("ab") as file:
            for each in messages:
                file.write(f"{each}\n".encode() if isinstance(each, str) else encode_line(each))

    def told(self, kind=object):
        """What the driver was told, of this class."""
        requests = map(decode_request, (self.folder / "told").read_bytes().splitlines())
        return [request for request in requests if isinstance(request, kind)]

    def wait(self, is_so):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := is_so()):
            assert time.monotonic() < deadline, (self.told(), self.lender.warnings(), self.lender.hosts())
            time.sleep(0.005)
        return found

    def nodes(self, *names, **leaving):
        self.say(
            NodesMessage(tuple(RayNode("id", name, "10.0.0.1", 4, "H100", 8.0, 1e9, False) for name in names), leaving)
        )

    def host(self, name, gpus=(0, 1, 2, 3), odd="", doubt=""):
        self.say(HostMessage(name, HostReport(("10.0.0.1", 7000), tuple(gpus)), odd, doubt))

    def ready(self, *names):
        self.say(ConnectedMessage("2"))
        self.nodes(*names)
        for name in names:
            self.host(name)
        self.wait(lambda: len(self.lender.hosts()) == len(names))

    def taken(self, job_id, wanted):
        before = len(self.told(TakeClaims))
        self.lender.ask(job_id, wanted)
        return list(self.wait(lambda: self.told(TakeClaims)[before:])[0].claims)


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    stage.lender.close()


def test_the_driver_is_told_whose_it_is_first(stage):
    first = stage.wait(stage.told)[0]
    assert first.address == "auto"
    assert first.secret == (b"s" * 16).hex()
    assert first.prefix == f"pollux:{first.namespace.removeprefix('pollux-')}:"
    assert first.claims == {}


def test_a_host_of_other_options_keeps_what_runs_there_and_gets_nothing_new(stage):
    stage.ready("a")
    (claim,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(claim, "0"))
    stage.wait(lambda: stage.lender.held("job"))
    stage.host("a", odd="node 'a' has a host of other options")
    stage.wait(lambda: stage.lender.hosts()[0].node.num_gpus == 1)
    assert "node 'a' has a host of other options" in stage.lender.warnings()
    stage.say(HostGoneMessage("a", "it ended"))
    stage.host("a")
    stage.wait(lambda: stage.lender.hosts() and stage.lender.hosts()[0].node.num_gpus == 4)
    assert stage.lender.warnings() == ()


def found(stage, job_id, places):
    """Have a job use places that no claim stood for; the claims in their order."""
    before = len(stage.told(TakeClaims))
    stage.lender.claim(job_id, places)
    return list(stage.wait(lambda: stage.told(TakeClaims)[before:])[0].claims)


def heard(stage):
    """Until everything that was said so far has been heard."""
    stage.nodes("a", a="heard")
    stage.wait(stage.lender.leaving)


def test_gpus_of_one_job_that_are_behind_each_others_claims_are_exchanged(stage):
    stage.ready("a")
    one, two = found(stage, "job", {"a": (0, 1)})
    stage.say(GrantedMessage(one, "1"))
    stage.say(GrantedMessage(two, "0"))
    heard(stage)
    assert stage.lender.held("job") == {"a": (0, 1)}
    assert len(stage.told(TakeClaims)) == 1
    assert stage.told(FreeClaims) == []


def test_a_group_that_was_made_anew_is_made_until_it_has_the_gpu_in_use(stage):
    stage.ready("a")
    (first,) = found(stage, "job", {"a": (2,)})
    stage.say(GrantedMessage(first, "0"))
    (second,) = stage.wait(lambda: stage.told(TakeClaims)[1:])[0].claims
    assert stage.told(FreeClaims) == [], "Ray would give the same one again"
    assert stage.lender.held("job") == {"a": (2,)}
    stage.say(GrantedMessage(second, "2"))
    assert stage.wait(lambda: stage.told(FreeClaims))[0].names == (first,)
    assert stage.lender.held("job") == {"a": (2,)}
    stage.lender.drop("job", {"a": (2,)})
    assert stage.wait(lambda: stage.told(FreeClaims)[1:])[0].names == (second,)


def test_a_gpu_in_use_that_others_got_from_ray_is_told_and_the_node_gets_no_more(stage):
    stage.ready("a")
    (first,) = found(stage, "job", {"a": (2,)})
    stage.say(GrantedMessage(first, "0"))
    (second,) = stage.wait(lambda: stage.told(TakeClaims)[1:])[0].claims
    stage.say(WaitsMessage(second))
    assert stage.wait(lambda: stage.told(FreeClaims))[0].names == (second,)
    assert stage.lender.held("job") == {"a": (2,)}
    (text,) = stage.wait(stage.lender.warnings)
    assert "GPU 2 of node 'a'" in text
    assert stage.lender.hosts()[0].node.num_gpus == 1
    # What stands for it in Ray's books is given back with it.
    stage.lender.drop("job", {"a": (2,)})
    assert stage.wait(lambda: stage.told(FreeClaims)[1:])[0].names == (first,)


def test_a_place_of_before_is_believed_while_the_host_says_nothing(stage):
    stage.ready("a")
    stage.host("a", gpus=(4, 5, 6, 7))
    stage.wait(lambda: stage.lender.hosts()[0].gpus == (4, 5, 6, 7))
    (claim,) = found(stage, "job", {"a": (0,)})
    stage.say(HostGoneMessage("a", "it ended"))
    stage.say(GrantedMessage(claim, "4"))
    heard(stage)
    assert len(stage.told(TakeClaims)) == 1
    assert stage.lender.held("job") == {"a": (0,)}


def test_what_was_held_on_the_way_is_given_back_with_the_claim(stage):
    stage.ready("a")
    (first,) = found(stage, "job", {"a": (2,)})
    stage.say(GrantedMessage(first, "0"))
    (second,) = stage.wait(lambda: stage.told(TakeClaims)[1:])[0].claims
    stage.lender.drop("job", {"a": (2,)})
    assert sorted(stage.wait(lambda: stage.told(FreeClaims))[0].names) == sorted([first, second])


def test_a_gpu_that_another_job_uses_is_not_given_to_a_second_one(stage):
    stage.ready("a")
    found(stage, "one", {"a": (2, 3)})
    (claim,) = stage.taken("two", {"a": 1})
    stage.say(GrantedMessage(claim, "2"))
    stage.wait(lambda: stage.lender.refusal("two"))
    assert "job 'one'" in stage.lender.refusal("two")
    assert stage.lender.held("two") == {}
    assert stage.lender.held("one") == {"a": (2, 3)}
    assert stage.wait(lambda: stage.told(FreeClaims))[0].names == (claim,)


def test_nodes_are_offered_once_their_host_is_up(stage):
    stage.nodes("a", "b")
    stage.host("b")
    (hosted,) = stage.wait(stage.lender.hosts)
    assert (hosted.node.id, hosted.node.num_gpus, hosted.node.gpu_type) == ("b", 4, "H100")
    assert (hosted.address, hosted.gpus) == (("10.0.0.1", 7000), (0, 1, 2, 3))
    assert stage.changed.is_set()


def test_a_place_is_held_when_ray_has_granted_it(stage):
    stage.ready("a")
    one, two = stage.taken("job", {"a": 2})
    stage.say(GrantedMessage(one, "3"))
    stage.say(GrantedMessage(two, "1"))
    stage.wait(lambda: stage.lender.held("job") == {"a": (1, 3)})
    stage.lender.drop("job", {"a": (3,)})
    assert stage.wait(lambda: stage.told(FreeClaims))[0].names == (one,)
    assert stage.lender.held("job") == {"a": (1,)}


def test_a_place_is_the_position_of_the_gpu_and_not_its_number(stage):
    stage.say(ConnectedMessage("2"))
    stage.nodes("a")
    stage.host("a", gpus=(4, 5, 6, 7))
    stage.wait(stage.lender.hosts)
    (name,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(name, "6"))
    stage.wait(lambda: stage.lender.held("job") == {"a": (2,)})


def test_a_part_of_a_gpu_is_no_place(stage):
    stage.ready("a")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(name, "MIG-1"))
    stage.wait(lambda: any("MIG-1" in line for line in stage.lender.warnings()))
    assert stage.lender.held("job") == {}
    assert stage.wait(lambda: stage.told(FreeClaims))[0].names == (name,)
    assert "'MIG-1', which is no whole GPU" in stage.lender.refusal("job")
    assert [hosted.node.num_gpus for hosted in stage.lender.hosts()] == [0]


def test_a_place_that_ray_fails_to_give_is_refused_and_its_node_is_tried_again_later(stage, caplog):
    stage.ready("a", "b")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(FailedMessage(name, "worker crashed"))
    why = stage.wait(lambda: stage.lender.refusal("job"))
    assert why in stage.lender.warnings()
    stage.wait(lambda: why in caplog.text)
    assert "node 'a' (worker crashed)" in why
    assert stage.wait(lambda: stage.told(FreeClaims))[0].names == (name,)
    assert [hosted.node.num_gpus for hosted in stage.lender.hosts()] == [0, 4]
    # Its generation ends, and the next question is another one.
    stage.lender.ask("job", {})
    assert stage.lender.refusal("job") == ""
    stage.lender._nodes.get("a").blocked_until -= 3600
    assert [hosted.node.num_gpus for hosted in stage.lender.hosts()] == [4, 4]
    assert stage.lender.warnings() == ()


def test_a_place_in_use_stays_claimed_when_ray_loses_it(stage):
    stage.ready("a")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(name, "1"))
    stage.wait(lambda: stage.lender.held("job"))
    stage.say(FailedMessage(name, "the group was removed"))
    stage.wait(stage.lender.warnings)
    assert stage.lender.held("job") == {"a": (1,)}
    assert (stage.lender.refusal("job"), stage.told(FreeClaims)) == ("", [])
    assert stage.lender.hosts()[0].node.num_gpus == 4
    stage.say(GrantedMessage(name, "1"))
    stage.wait(lambda: not stage.lender.warnings())


def limited(stage):
    """Others hold all of node a, and a claim stays in Ray's queue there: its name."""
    stage.ready("a")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(WaitsMessage(name))
    stage.wait(lambda: stage.lender.refusal("job"))
    stage.lender.ask("job", {})
    assert stage.lender.hosts()[0].node.num_gpus == 0
    return name


def test_a_claim_left_in_the_queue_that_fails_gives_the_node_free(stage):
    stage.say(FailedMessage(limited(stage), "no idea"))
    stage.wait(lambda: stage.lender.hosts()[0].node.num_gpus == 4)
    assert stage.lender.warnings() == ()


def test_a_claim_left_in_the_queue_does_not_outlive_the_service(stage):
    name = limited(stage)
    assert not stage.told(FreeClaims)
    stage.lender.close()
    assert [request.names for request in stage.told(FreeClaims)] == [(name,)]


def test_others_hold_part_of_a_node(stage):
    stage.ready("a", "b")
    one, two, three = stage.taken("job", {"a": 3})
    stage.say(GrantedMessage(one, "0"))
    stage.say(WaitsMessage(two))
    stage.say(WaitsMessage(three))
    stage.wait(lambda: "2 on a missing" in stage.lender.refusal("job"))
    assert [hosted.node.num_gpus for hosted in stage.lender.hosts()] == [1, 4]
    assert stage.lender.held("job") == {"a": (0,)}

    # The job goes elsewhere; one claim stays in Ray's queue and tells when the others have left.
    stage.lender.ask("job", {"a": 1})
    assert stage.lender.refusal("job") == ""
    assert stage.wait(lambda: stage.told(FreeClaims))[0].names == (three,)
    stage.say(GrantedMessage(two, "1"))
    stage.wait(lambda: [hosted.node.num_gpus for hosted in stage.lender.hosts()] == [4, 4])
    assert stage.wait(lambda: stage.told(FreeClaims)[1:])[0].names == (two,)
    assert stage.lender.held("job") == {"a": (0,)}


def test_waiting_for_our_own_jobs_is_no_refusal(stage):
    stage.ready("a")
    for number, name in enumerate(stage.taken("wide", {"a": 4})):
        stage.say(GrantedMessage(name, str(number)))
    stage.wait(lambda: stage.lender.held("wide") == {"a": (0, 1, 2, 3)})
    (name,) = stage.taken("patient", {"a": 1})
    stage.changed.clear()
    stage.say(WaitsMessage(name))
    assert stage.changed.wait(PATIENCE_SECONDS)
    assert stage.lender.refusal("patient") == ""
    assert stage.lender.hosts()[0].node.num_gpus == 4
    stage.lender.drop("wide", {"a": (0, 1, 2, 3)})
    assert stage.wait(lambda: stage.told(RetryClaims))[0].names == (name,)


def test_a_host_that_ended_is_a_node_less_until_it_is_back(stage, caplog):
    stage.ready("a", "b")
    stage.say(HostGoneMessage("a", "the host of node 'a' ended (1)"))
    stage.wait(lambda: [hosted.node.id for hosted in stage.lender.hosts()] == ["b"])
    assert stage.lender.warnings() == ("the host of node 'a' ended (1)",)
    stage.wait(lambda: "the host of node 'a' ended (1)" in caplog.text)
    stage.host("a")
    stage.wait(lambda: len(stage.lender.hosts()) == 2)
    assert stage.lender.warnings() == ()


def test_a_node_that_left_takes_its_claims_along(stage):
    stage.ready("a", "b")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(name, "0"))
    stage.wait(lambda: stage.lender.held("job"))
    stage.nodes("b")
    stage.wait(lambda: not stage.lender.held("job"))
    assert stage.wait(lambda: stage.told(FreeClaims))[0].names == (name,)
    assert [hosted.node.id for hosted in stage.lender.hosts()] == ["b"]


def test_a_new_object_knows_what_was_lent(stage):
    stage.ready("a")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(name, "2"))
    stage.wait(lambda: stage.lender.held("job"))
    stage.lender.close()
    before = len(stage.told())
    stage.lender = stage.begin()
    assert stage.lender.held("job") == {"a": (2,)}
    stage.lender.claim("job", {"a": (2,)})
    first = stage.wait(lambda: stage.told()[before:])[0]
    assert first.claims == {name: "a"}
    assert first.prefix == stage.told()[0].prefix
    assert not stage.told(FreeClaims)


def test_nodes_in_use_stay_when_the_service_comes_back_and_ray_does_not(stage):
    stage.ready("a", "b", "c")
    for node in ("a", "b"):
        (name,) = stage.taken(f"on-{node}", {node: 1})
        stage.say(GrantedMessage(name, "0"))
    stage.wait(lambda: stage.lender.held("on-a") and stage.lender.held("on-b"))
    before = {hosted.node.id: hosted for hosted in stage.lender.hosts()}
    stage.lender.close()
    (stage.folder / "said").write_text("")
    stage.lender = stage.begin()
    assert {hosted.node.id: hosted for hosted in stage.lender.hosts()} == {name: before[name] for name in ("a", "b")}
    stage.say(UnreachableMessage("nobody listens"))
    stage.wait(stage.lender.warnings)
    assert len(stage.lender.hosts()) == 2
    # Ray is back, and one of them is gone.
    stage.ready("b")
    assert stage.lender.held("on-a") == {}
    assert stage.lender.held("on-b") == {"b": (0,)}


def test_notes_of_nodes_that_cannot_be_read_do_no_harm(stage):
    stage.ready("a")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(name, "0"))
    stage.wait(lambda: stage.lender.held("job"))
    stage.lender.close()
    (stage.folder / "said").write_text("")
    path = stage.folder / "home" / "ray.json"
    record = json.loads(path.read_text())
    (noted,) = record["nodes"]
    bad = [{}, {**noted, "address": []}, {**noted, "described": {"name": "a"}}, 3]
    path.write_text(json.dumps({**record, "nodes": bad}))
    stage.lender = stage.begin()
    assert stage.lender.hosts() == ()
    assert stage.lender.held("job") == {"a": (0,)}


def test_a_driver_that_dies_is_started_again_and_its_nodes_stay(stage):
    stage.ready("a")
    stage.say("die")
    stage.wait(lambda: any("out of breath" in line for line in stage.lender.warnings()))
    assert [hosted.node.id for hosted in stage.lender.hosts()] == ["a"]
    stage.wait(lambda: len(stage.told(DriverOrder)) > 1)
    stage.say(ConnectedMessage("2"))
    stage.say(WellMessage())
    stage.wait(lambda: not stage.lender.warnings())


def test_a_head_that_has_forgotten_its_nodes_is_told_from_a_cluster_that_never_had_any(stage, caplog):
    stage.ready("n1")
    stage.say("die")
    stage.wait(lambda: stage.lender.warnings())
    stage.say(ConnectedMessage("2"))
    stage.nodes()
    stage.say(WellMessage())
    (said,) = stage.wait(lambda: [each for each in stage.lender.warnings() if "Ray's head was restarted" in each])
    assert "jobs that ran there go on from their checkpoints once Ray is started on its nodes again" in said
    stage.wait(lambda: said in caplog.text)
    assert stage.lender.warnings() == (said,)
    stage.nodes("n2")
    stage.wait(lambda: stage.lender.warnings() == ())
    stage.nodes()
    (said,) = stage.wait(stage.lender.warnings)
    assert "has no node with GPUs" in said, "nodes that leave one after another are no new head"


def test_a_driver_that_falls_silent_is_said_and_its_nodes_stay(stage, monkeypatch):
    stage.ready("a")
    monkeypatch.setattr(driver_client, "_SILENCE_SECONDS", 0.0)
    stage.wait(lambda: any("does not answer" in line for line in stage.lender.warnings()))
    assert [hosted.node.id for hosted in stage.lender.hosts()] == ["a"]
    monkeypatch.undo()
    stage.say(WellMessage())
    stage.wait(lambda: not stage.lender.warnings())
    assert len(stage.told(DriverOrder)) == 1


def test_a_driver_that_stays_silent_is_replaced(stage, monkeypatch):
    monkeypatch.setattr(driver_client, "_SILENCE_SECONDS", 0.0)
    monkeypatch.setattr(driver_client, "_GIVE_UP_SECONDS", 0.0)
    stage.ready("a")
    (stage.folder / "said").write_text("")
    stage.wait(lambda: len(stage.told(DriverOrder)) > 1)
    assert [hosted.node.id for hosted in stage.lender.hosts()] == ["a"]


def test_a_driver_that_talks_nonsense_is_replaced(stage, caplog):
    stage.ready("a")
    stage.say('["HostMessage", {}]')
    stage.wait(lambda: len(stage.told(DriverOrder)) > 1)
    stage.wait(lambda: "started again" in caplog.text)


def test_ray_out_of_reach_is_said_with_the_reason(stage, caplog):
    stage.say(UnreachableMessage("nobody listens at 10.0.0.9:6379"))
    said = stage.wait(stage.lender.warnings)
    assert "Ray cannot be reached (nobody listens at 10.0.0.9:6379)" in said[0]
    stage.wait(lambda: said[0] in caplog.text)
    assert "--address" in said[0]
    assert stage.lender.hosts() == ()


@pytest.mark.parametrize(("mode", "what"), [("", "while RAY_AUTH_MODE is not token"), ("token", "that it was shown")])
def test_a_token_that_ray_refuses_is_said_at_once_and_stays_the_reason(stage, monkeypatch, mode, what):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    stage.say("log: W gcs_client.cc:210: Unauthenticated: RPC error: InvalidAuthToken: it is missing or incorrect")
    (said,) = stage.wait(stage.lender.warnings)
    assert said.startswith("Ray cannot be reached (it ")
    assert what in said
    assert all(name in said for name in ("RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN,", "RAY_AUTH_TOKEN_PATH"))
    stage.say(UnreachableMessage("Failed to connect to Ray cluster"))
    stage.say("die")
    stage.wait(lambda: len(stage.told(DriverOrder)) > 1)
    assert stage.lender.warnings() == (said,)
    stage.say(UnreachableMessage("nobody listens"))
    # What the driver before it wrote is over.
    stage.wait(lambda: "(nobody listens)" in stage.lender.warnings()[0])


def test_a_cluster_without_gpus_is_said_once_it_was_looked_at(stage):
    stage.say(ConnectedMessage("2"))
    stage.wait(lambda: stage.lender._link.is_connected)
    assert stage.lender.warnings() == ()
    stage.nodes()
    assert "no node with GPUs" in stage.wait(stage.lender.warnings)[0]


def test_a_doubt_about_a_node_is_told_and_the_node_used(stage):
    stage.ready("a")
    stage.host("a", doubt="nothing can tell")
    stage.wait(lambda: stage.lender.warnings() == ("node 'a': nothing can tell",))
    assert stage.taken("job", {"a": 1})
    stage.host("a")
    stage.wait(lambda: stage.lender.warnings() == ())


def test_where_nodes_can_be_had_none_is_no_trouble_until_one_is_awaited(tmp_path):
    stage = Stage(tmp_path, autoscale=True)
    try:
        stage.ready("a")
        stage.nodes()
        stage.wait(lambda: not stage.lender.hosts())
        assert stage.lender.warnings() == ()
        stage.lender.desire(2)
        said = "no node with GPUs yet; Ray's autoscaler was asked for 2: see 'ray status'"
        stage.wait(lambda: stage.lender.warnings() == (said,))
    finally:
        stage.lender.close()


def test_the_autoscaler_hears_of_a_wish_once_and_only_where_allowed(tmp_path):
    stage = Stage(tmp_path, autoscale=True)
    try:
        stage.wait(stage.told)
        stage.lender.desire(3)
        stage.lender.desire(3)
        stage.lender.desire(4)
        assert [
            request.num_nodes for request in stage.wait(lambda: stage.told(DesireNodes)[1:] and stage.told(DesireNodes))
        ] == [
            3,
            4,
        ]
    finally:
        stage.lender.close()


def test_without_leave_the_autoscaler_hears_nothing(stage):
    stage.wait(stage.told)
    stage.lender.desire(3)
    stage.taken("job", {"a": 1})
    assert not stage.told(DesireNodes)


def test_a_new_driver_knows_the_wish_and_the_end_of_all_takes_it_back(tmp_path):
    stage = Stage(tmp_path, autoscale=True)
    try:
        assert stage.wait(stage.told)[0].desired.num_nodes is None
        stage.ready("a")
        stage.lender.desire(3)
        stage.wait(lambda: stage.told(DesireNodes))
        stage.say("die")
        first = stage.wait(lambda: stage.told(DriverOrder)[1:])[0]
        assert first.desired.num_nodes == 3
    finally:
        stage.lender.close()
    assert stage.told(ReleaseHosts) == [ReleaseHosts()]


def test_what_still_runs_is_not_parted_from(stage):
    stage.ready("a")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(name, "0"))
    stage.wait(lambda: stage.lender.held("job"))
    stage.lender.close()
    assert stage.told(ReleaseHosts) == []


def test_a_node_that_ray_drains_is_left_and_stays_until_it_has_gone(stage):
    stage.ready("a", "b")
    (name,) = stage.taken("job", {"a": 1})
    stage.say(GrantedMessage(name, "0"))
    stage.wait(lambda: stage.lender.held("job"))
    stage.nodes("a", "b", a="Ray drains it")
    stage.wait(lambda: stage.lender.leaving() == {"a": "Ray drains it"})
    assert [hosted.node.id for hosted in stage.lender.hosts()] == ["a", "b"]
    assert stage.lender.held("job") == {"a": (0,)}
    assert stage.lender.warnings() == ("node 'a' is being left: Ray drains it",)
    stage.nodes("a", "b")
    stage.wait(lambda: not stage.lender.leaving())
