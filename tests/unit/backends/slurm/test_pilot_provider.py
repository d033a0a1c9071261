"""The lender's rounds against a Slurm that is played: growing, shrinking, ends, refusals, and what is not answered."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.backends.slurm.pilot_provider import SlurmPilotProvider
from pollux.backends.slurm.script import SlurmOptions
from pollux.core.errors import BackendFailed


class PlayedSlurm:
    """Answers as Slurm would; `rows` and `states` are what squeue and sinfo print."""

    def __init__(self):
        self.rows: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.submitted: list[tuple[int, tuple[str, ...]]] = []
        self.cancelled: list[str] = []
        self.failing = ""
        self.odd = ""
        self.calls = 0

    def jobs(self, name):
        self._maybe_fail()
        return self.odd + "".join(f"{pilot}|{rest}\n" for pilot, rest in self.rows.items())

    def nodes(self, names):
        self._maybe_fail()
        return "".join(f"{name}|{self.states.get(name, 'mixed')}|gpu:4|10.0.0.1|64|none\n" for name in names)

    def limits(self):
        self._maybe_fail()
        self.calls -= 1
        return "KillWait = 30 sec\nPreemptType = preempt/none\n", "PartitionName=main Default=YES GraceTime=5\n"

    def submit(self, script, count, exclude=()):
        self._maybe_fail()
        self.submitted.append((count, tuple(exclude)))
        array = len(self.submitted)
        for number in range(count):
            self.rows[f"{array}_{number}"] = "PENDING|10:00|10:00||pilot|Priority"
        return str(array)

    def cancel(self, pilots):
        self._maybe_fail()
        self.cancelled += pilots
        for pilot in pilots:
            self.rows[pilot] = "CANCELLED|0:00|10:00||pilot|None"

    def _maybe_fail(self):
        self.calls += 1
        if self.failing:
            raise BackendFailed(self.failing)

    def grant(self, pilot, node, left="1:00:00"):
        self.rows[pilot] = f"RUNNING|{left}|1:00:00|{node}|pilot|None"


class Bench:
    def __init__(self, folder: Path, **given):
        self.now = 1000.0
        self.slurm = PlayedSlurm()
        self.folder = folder / "slurm"
        options = {"nodes": "2", "gpus_per_node": 4, "poll_seconds": 1000.0, **given}
        self.lender = SlurmPilotProvider(self.folder, SlurmOptions(**options), self.slurm, lambda: self.now)
        self.changes = 0
        self.lender.queue.folder.prepare(b"secret")
        self.lender._changed = self.changed

    def changed(self):
        self.changes += 1

    def turn(self, seconds=5.0):
        self.now += seconds
        self.lender.do_round()

    def announce(self, pilot, node, **more):
        facts = {"gpu_type": "A100", "cpus": 8.0, "memory_bytes": 0.0}
        host = {"node": node, "address": "10.0.0.1", "port": 4000, "places": 4, "gpus": [0, 1, 2, 3], **more}
        (self.folder / "pilots" / f"{pilot}.{node}.facts").write_text(json.dumps(facts))
        (self.folder / "pilots" / f"{pilot}.{node}.json").write_text(json.dumps(host))

    def lend(self, pilot, node, left="1:00:00"):
        self.slurm.grant(pilot, node, left)
        self.announce(pilot, node)

    @property
    def nodes(self):
        return [hosted.node.id for hosted in self.lender.hosts()]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_the_grace_is_read_now_and_then_and_stays_where_slurm_does_not_answer(bench, monkeypatch):
    assert bench.lender.queue.grace_seconds is None
    bench.turn()
    assert bench.lender.queue.grace_seconds == 30.0
    monkeypatch.setattr(bench.slurm, "limits", lambda: ("KillWait = 60 sec", ""))
    bench.turn()
    assert bench.lender.queue.grace_seconds == 30.0, "not in every round"
    bench.turn(600.0)
    assert bench.lender.queue.grace_seconds == 60.0
    bench.slurm.failing = "no answer"
    bench.turn(600.0)
    assert bench.lender.queue.grace_seconds == 60.0


def test_a_state_that_nobody_knows_is_told_and_its_node_left(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.lend("1_1", "node2")
    bench.turn()
    bench.lender.ask("job", {"node1": 1})
    bench.slurm.rows["1_0"] = "DANCING|30:00|1:00:00|node1|pilot|None"
    bench.turn()
    assert bench.nodes == ["node1", "node2"]
    assert bench.lender.leaving() == {"node1": "Slurm has its pilot as DANCING"}
    assert any("'DANCING', which this version does not know" in warning for warning in bench.lender.warnings())
    assert bench.slurm.submitted == [(2, ()), (1, ())], "another is asked for"
    assert bench.slurm.cancelled == [], "a job is there"
    bench.lender.drop("job", {"node1": (0,)})
    bench.turn()
    assert bench.slurm.cancelled == ["1_0"]


@pytest.mark.parametrize("seconds", [0.0, 2.5, 40.0])
def test_a_pilot_that_is_signalled_is_held_however_slow_its_slurmd_is(bench, seconds):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.lend("1_1", "node2")
    bench.turn()
    bench.slurm.rows["1_0"] = "SIGNALING|30:00|1:00:00|node1|pilot|None"
    bench.turn(seconds)
    assert (bench.nodes, bench.lender.leaving()) == (["node1", "node2"], {})


def test_a_pilot_that_somebody_cancels_is_offered_until_its_killwait_is_over(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.lend("1_1", "node2")
    bench.turn()
    bench.lender.ask("job", {"node1": 1})
    bench.slurm.rows["1_0"] = "COMPLETING|30:00|1:00:00|node1|pilot|None"
    for _ in range(3):
        bench.turn()
        assert bench.nodes == ["node1", "node2"]
        assert bench.lender.leaving() == {"node1": "Slurm has its pilot as COMPLETING"}
    bench.slurm.rows["1_0"] = "CANCELLED|0:00|1:00:00|node1|pilot|None"
    bench.turn()
    assert (bench.nodes, bench.lender.leaving()) == (["node2"], {})


def test_a_host_that_does_not_come_is_not_looked_for_all_the_time(bench):
    bench.turn()
    bench.slurm.grant("1_0", "node1")
    bench.turn()
    assert bench.lender.rounds.expect_news
    bench.turn(91.0)
    assert not bench.lender.rounds.expect_news
    assert any("has not announced itself" in warning for warning in bench.lender.warnings())
    bench.announce("1_0", "node1")
    bench.turn()
    assert bench.nodes == ["node1"]


def test_a_pilot_whose_host_never_comes_is_given_back_and_another_is_asked_for(bench):
    bench.turn()
    bench.slurm.grant("1_0", "node1")
    bench.lend("1_1", "node2")
    bench.turn()
    bench.turn(500.0)
    assert (bench.slurm.submitted, bench.slurm.cancelled) == ([(2, ())], []), "it may be slow"
    bench.turn(200.0)
    assert bench.slurm.cancelled == ["1_0"]
    assert bench.slurm.submitted == [(2, ()), (1, ())]
    assert bench.nodes == ["node2"]
    bench.slurm.grant("2_0", "node3")
    bench.turn()
    bench.turn(1100.0)
    assert bench.slurm.cancelled == ["1_0"], "the next has longer: preparations may take their time"
    assert any("given back after 1200 s" in warning for warning in bench.lender.warnings())
    bench.turn(200.0)
    assert bench.slurm.cancelled == ["1_0", "2_0"]


def test_names_of_pilots_that_ended_while_nobody_looked_are_free_again(bench):
    names = bench.folder / "names"
    (names / "node1").write_text("7_0")
    (names / "node2").write_text("8_0")
    bench.announce("7_0", "node1")
    bench.lend("8_0", "node2")
    (bench.folder / "pilots" / "7_0.log").write_text("killed")
    bench.slurm.odd = "what is this\n"
    bench.turn()
    assert (names / "node1").exists(), "it may be in the line that was not understood"
    bench.slurm.odd = ""
    bench.turn()
    assert [path.name for path in names.iterdir()] == ["node2"]
    left = sorted(path.name for path in (bench.folder / "pilots").iterdir())
    assert left == ["7_0.log", "8_0.node2.facts", "8_0.node2.json"]
    assert bench.nodes == ["node2"]


def test_nodes_are_asked_for_once_and_lent_when_their_hosts_are_up(bench):
    bench.turn()
    bench.turn()
    assert bench.slurm.submitted == [(2, ())]
    assert bench.lender.warnings() == ("2 nodes wait in Slurm's queue: Priority",)
    bench.slurm.grant("1_0", "node1")
    bench.turn()
    assert bench.nodes == []
    bench.announce("1_0", "node1")
    bench.lender.do_round(full=False)
    assert bench.nodes == ["node1"]
    bench.lend("1_1", "node2")
    bench.turn()
    assert bench.nodes == ["node1", "node2"]
    assert bench.lender.warnings() == ()
    assert len(bench.slurm.submitted) == 1


def test_the_secret_is_for_its_owner_only(bench):
    assert (bench.folder / "secret").stat().st_mode & 0o777 == 0o600
    assert bytes.fromhex((bench.folder / "secret").read_text()) == b"secret"


def test_places_are_given_from_the_nodes_that_are_lent(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.turn()
    bench.lender.ask("job", {"node1": 3})
    assert bench.lender.held("job") == {"node1": (0, 1, 2)}
    assert bench.lender.refusal("job") == ""
    bench.lender.ask("other", {"node9": 1})
    assert "node9" in bench.lender.refusal("other")


def test_it_grows_and_shrinks_with_what_is_desired(tmp_path):
    bench = Bench(tmp_path, nodes="1..3", idle_seconds=60.0)
    bench.turn()
    bench.lender.desire(9)
    bench.turn()
    assert bench.slurm.submitted == [(1, ()), (2, ())]
    bench.lend("1_0", "node1")
    bench.lend("2_0", "node2")
    bench.turn()
    bench.lender.ask("job", {"node2": 1})
    bench.lender.desire(1)
    bench.turn()
    assert bench.slurm.cancelled == []
    bench.turn(61.0)
    assert bench.slurm.cancelled == ["2_1", "1_0"]
    bench.turn()
    assert bench.nodes == ["node2"]


def test_a_node_that_does_not_answer_for_long_is_given_back_and_another_is_asked_for(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.lend("1_1", "node2")
    bench.turn()
    bench.lender.ask("job", {"node2": 1})
    asked = len(bench.slurm.submitted)
    (silent,) = [hosted for hosted in bench.lender.hosts() if hosted.node.id == "node2"]
    bench.lender.release_silent([silent])
    bench.turn()
    assert bench.slurm.cancelled == [], "a job still counts on it"
    bench.lender.release_silent([])
    bench.lender.drop("job", bench.lender.held("job"))
    bench.turn()
    assert bench.slurm.cancelled == [], "it has answered meanwhile"
    bench.lender.release_silent([replace(silent, address=("10.0.0.9", 1))])
    bench.turn()
    assert bench.slurm.cancelled == [], "that was another host of its name"
    bench.lender.release_silent([silent])
    bench.turn()
    bench.turn()
    assert bench.slurm.cancelled == ["1_1"]
    assert bench.slurm.submitted[asked:] == [(1, ())]
    assert bench.nodes == ["node1"]


def test_a_pilot_near_its_limit_is_left_and_replaced_before(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.lend("1_1", "node2", left="12:00")
    bench.turn()
    bench.lender.ask("job", {"node2": 1})
    assert bench.slurm.submitted == [(2, ()), (1, ())], "the next one is asked for ahead"
    bench.slurm.failing = "squeue does not answer"
    bench.turn(10 * 60.0)
    assert bench.lender.leaving() == {"node2": "its pilot's time limit is near"}, "the clock goes on without Slurm"
    assert bench.nodes == ["node1", "node2"]
    bench.slurm.failing = ""
    bench.slurm.grant("1_1", "node2", "2:00")
    bench.turn()
    assert bench.slurm.cancelled == []
    bench.lender.drop("job", {"node2": (0,)})
    bench.turn()
    assert bench.slurm.cancelled == ["1_1"]
    bench.turn()
    assert bench.nodes == ["node1"]
    assert len(bench.slurm.submitted) == 2


def test_an_end_that_slurm_announces_is_seen_at_a_glance(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.turn()
    before = bench.changes
    (bench.folder / "pilots" / "1_0.-.leaving").touch()
    bench.lender.do_round(full=False)
    assert bench.lender.leaving() == {"node1": "Slurm announced the end of its pilot"}
    assert bench.changes > before


def test_without_an_answer_it_goes_on_with_what_it_has(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.turn()
    bench.slurm.failing = "'squeue' did not answer within 20 s"
    del bench.slurm.rows["1_0"]
    bench.turn()
    assert bench.nodes == ["node1"]
    assert any("did not answer" in warning and "going on" in warning for warning in bench.lender.warnings())
    bench.lender.ask("job", {"node1": 2})
    assert bench.lender.held("job") == {"node1": (0, 1)}
    bench.slurm.failing = ""
    bench.slurm.grant("1_0", "node1")
    bench.turn()
    assert bench.lender.warnings() == ("1 node waits in Slurm's queue: Priority",)


def test_a_line_that_is_not_understood_loses_no_node(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.turn()
    del bench.slurm.rows["1_0"]
    bench.slurm.odd = "1_0|RUNNING?|1:00:00|node1\n"
    bench.turn()
    assert bench.nodes == ["node1"]
    assert "cannot be understood" in bench.lender.warnings()[0]
    assert len(bench.slurm.submitted) == 1
    bench.slurm.odd = ""
    bench.turn()
    assert bench.nodes == []


def test_pilots_that_fail_at_once_are_not_asked_for_in_a_storm(bench):
    bench.turn()
    for turn in range(20):
        for pilot, row in bench.slurm.rows.items():
            if row.startswith("PENDING"):
                bench.slurm.rows[pilot] = "FAILED|0:00|10:00|node1|pilot|NonZeroExitCode"
                (bench.folder / "pilots" / f"{pilot}.log").write_text("\nno python here\n")
        bench.turn(5.0)
        assert turn > 2 or len(bench.slurm.submitted) <= 2
    assert len(bench.slurm.submitted) <= 6
    (warning,) = [each for each in bench.lender.warnings() if "ended early" in each]
    assert "NonZeroExitCode; no python here" in warning


def test_a_refused_submission_is_said_and_tried_again_later(bench):
    bench.slurm.submit = lambda *_: (_ for _ in ()).throw(BackendFailed("'sbatch' failed: Invalid account"))
    bench.turn()
    assert (
        "2 nodes cannot be asked for: 'sbatch' failed: Invalid account; Slurm is asked for 1 in 30 s"
        in bench.lender.warnings()
    )
    del bench.slurm.submit
    bench.turn()
    assert bench.slurm.submitted == []
    bench.turn(31.0)
    assert bench.slurm.submitted == [(1, ())]
    bench.turn()
    assert bench.slurm.submitted == [(1, ()), (1, ())]
    bench.turn()
    assert not any("asked for" in warning for warning in bench.lender.warnings())


def test_a_quota_for_some_of_the_nodes_gives_those(tmp_path, monkeypatch):
    """An array is refused as a whole: fewer are asked for until they are taken, and more when there is room."""
    bench = Bench(tmp_path, nodes="8")
    quota, asked, submit = 4, [], bench.slurm.submit

    def within_quota(script, count, exclude=()):
        asked.append(count)
        if len([row for row in bench.slurm.rows.values() if row.startswith("PENDING")]) + count > quota:
            raise BackendFailed("'sbatch' failed: QOSMaxSubmitJobPerUserLimit")
        return submit(script, count, exclude)

    monkeypatch.setattr(bench.slurm, "submit", within_quota)
    for _ in range(5):
        bench.turn(31.0)
    assert asked == [8, 4, 4, 2, 1]
    assert len(bench.slurm.rows) == 4
    assert any("QOSMaxSubmitJobPerUserLimit" in warning for warning in bench.lender.warnings())
    quota = 8
    for _ in range(3):
        bench.turn(31.0)
    assert asked[5:] == [1, 2, 1]
    assert len(bench.slurm.rows) == 8
    assert not any("asked for" in warning for warning in bench.lender.warnings())


def test_a_folder_that_is_full_keeps_nobody_from_looking(bench, monkeypatch, caplog):
    bench.turn()
    put, full = bench.lender.queue.folder._put, [True]

    def no_space(name, text):
        if full:
            raise OSError(28, "No space left on device")
        put(name, text)

    monkeypatch.setattr(bench.lender.queue.folder, "_put", no_space)
    bench.lend("1_0", "node1")
    bench.turn()
    assert bench.nodes == ["node1"]
    (warning,) = [each for each in bench.lender.warnings() if "No space left" in each]
    assert f"cannot write {bench.folder}: No space left on device; free some space" in warning
    assert not any(record.exc_info for record in caplog.records)
    full.clear()
    bench.turn()
    assert not any("No space left" in each for each in bench.lender.warnings())
    assert [row.id for row in bench.lender.queue.folder.load_running()[0]] == ["1_0"], (
        "what could not be kept is kept later"
    )


def test_a_node_that_lies_is_given_back_and_not_asked_for_again(bench):
    bench.turn()
    bench.slurm.grant("1_0", "node1")
    (bench.folder / "pilots" / "1_0.node1.problem").write_text("4 GPUs were asked for, and Slurm gave '0'")
    bench.turn()
    assert bench.slurm.cancelled == ["1_0"]
    assert any("Slurm gave '0'" in warning for warning in bench.lender.warnings())
    assert bench.slurm.submitted[-1] == (1, ("node1",))


def test_an_announcement_that_is_damaged_is_said(bench):
    bench.turn()
    bench.slurm.grant("1_0", "node1")
    bench.announce("1_0", "node1", port=99999)
    bench.turn()
    assert bench.nodes == []
    assert any("cannot be used" in warning for warning in bench.lender.warnings())


def test_notes_of_ended_pilots_go_and_their_logs_stay(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    (bench.folder / "pilots" / "1_0.log").write_text("hello\n")
    (bench.folder / "names" / "node1").write_text("1_0")
    bench.turn(100.0)
    bench.slurm.rows["1_0"] = "TIMEOUT|0:00|10:00|node1|pilot|TimeLimit"
    bench.turn()
    assert [path.name for path in (bench.folder / "pilots").iterdir()] == ["1_0.log"]
    assert not (bench.folder / "names" / "node1").exists()
    assert bench.nodes == []


def test_a_new_object_offers_at_once_what_ran_before(bench, tmp_path):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.turn()
    again = SlurmPilotProvider(bench.folder, bench.lender.options, bench.slurm, lambda: bench.now)
    bench.slurm.failing = "slurmctld is down"
    again.start(b"secret", "127.0.0.1", lambda: None)
    try:
        assert [hosted.node.id for hosted in again.hosts()] == ["node1"]
    finally:
        again.close()


def test_a_node_whose_type_only_slurm_knows_keeps_it_under_a_new_object(bench, monkeypatch):
    """Of another one for a moment, jobs would be moved off it, or spread over two types."""
    monkeypatch.setattr(bench.slurm, "nodes", lambda names: "node1|mixed|gpu:v100:4|10.0.0.1|64|none\n")
    bench.turn()
    bench.lend("1_0", "node1")
    facts = bench.folder / "pilots" / "1_0.node1.facts"
    facts.write_text(facts.read_text().replace("A100", ""))
    bench.turn()
    assert [hosted.node.gpu_type for hosted in bench.lender.hosts()] == ["v100"]
    again = SlurmPilotProvider(bench.folder, bench.lender.options, bench.slurm, lambda: bench.now)
    bench.slurm.failing = "slurmctld is down"
    again.start(b"secret", "127.0.0.1", lambda: None)
    try:
        assert again.hosts() == bench.lender.hosts()
    finally:
        again.close()


@pytest.mark.parametrize("text", ["[]", '[["1_0", ["node1"], "pilot"]]', '{"pilots": 1, "nodes": {}}', "{", "null"])
def test_what_was_kept_and_cannot_be_understood_is_left_out(bench, text):
    (bench.folder / "running.json").write_text(text)
    assert bench.lender.queue.folder.load_running() == ([], {})


def test_closing_cancels_only_what_waits_and_only_without_jobs(bench):
    bench.turn()
    bench.lend("1_0", "node1")
    bench.turn()
    bench.lender.ask("job", {"node1": 1})
    bench.lender._give_back_unused()
    assert bench.slurm.cancelled == []
    bench.lender.drop("job", {"node1": (0,)})
    bench.lender._give_back_unused()
    assert bench.slurm.cancelled == ["1_1"]
    assert (bench.folder / "pulse").read_text().startswith("closed")


def test_a_round_is_two_commands_however_many_nodes(tmp_path):
    bench = Bench(tmp_path, nodes="50")
    bench.turn()
    for number in range(50):
        bench.lend(f"1_{number}", f"node{number}")
    bench.turn()
    bench.slurm.calls = 0
    bench.turn()
    assert bench.slurm.calls == 2
    assert len(bench.nodes) == 50
