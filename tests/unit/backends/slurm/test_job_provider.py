"""Slurm without pilots, against one that is played: nodes come when jobs want them and go when they do not."""

import json

import pytest

from pollux.backends.nodes.slot_table import SlotTable
from pollux.backends.slurm.job_provider import SlurmJobProvider
from pollux.backends.slurm.job_requests import host_port
from pollux.backends.slurm.script import SlurmOptions
from pollux.core.errors import BackendFailed


class PlayedSlurm:
    def __init__(self):
        self.rows: dict[str, str] = {}
        self.states = {"node1": "idle", "node2": "mixed", "node3": "allocated", "node4": "drained"}
        self.scripts: list[str] = []
        self.cancelled: list[str] = []
        self.used: dict[str, int] = {}
        self.kept: list[tuple[str, list[str]]] = []
        self.failing = ""
        self.stiff = ""
        self.slow = False
        self.odd = ""

    def jobs(self, name):
        if self.failing:
            raise BackendFailed(self.failing)
        return "".join(f"{pilot}|{rest}\n" for pilot, rest in self.rows.items())

    def all_nodes(self, partition):
        if self.failing:
            raise BackendFailed(self.failing)
        used = {name: 4 * (state == "allocated") for name, state in self.states.items()} | self.used
        return self.odd + "".join(
            f"{name}|{state}|gpu:a100:4|10.0.0.{name[-1]}|64|gpu:a100:{used[name]}(IDX:0)|0/64/0/64|none\n"
            for name, state in self.states.items()
        )

    def limits(self):
        return "KillWait = 30 sec\n", ""

    def submit(self, script, count, exclude=()):
        self.scripts.append(script)
        (comment,) = [line.split("=", 1)[1] for line in script.splitlines() if line.startswith("#SBATCH --comment")]
        pilot = f"{len(self.scripts)}_0"
        self.rows[pilot] = f"PENDING|10:00|10:00||{comment.strip(chr(39))}|Priority"
        return str(len(self.scripts))

    def cancel(self, pilots):
        self.cancelled += pilots
        for pilot in pilots if not self.slow else ():
            self.rows[pilot] = "CANCELLED|0:00|10:00||(null)|None"

    def keep_only(self, pilot, nodes):
        if self.stiff:
            raise BackendFailed(self.stiff)
        self.kept.append((pilot, list(nodes)))
        state, left, limit, _, comment, reason = self.rows[pilot].split("|")
        self.rows[pilot] = "|".join((state, left, limit, ",".join(nodes), comment, reason))


class Bench:
    def __init__(self, folder):
        self.now = 1000.0
        self.slurm = PlayedSlurm()
        self.folder = folder / "pool"
        self.changes = 0
        options = SlurmOptions(gpus_per_node=4, mode="job")
        self.lender = SlurmJobProvider(self.folder, options, self.slurm, lambda: self.now)
        self.lender.queue.folder.prepare(b"secret")
        self.lender._changed = self.changed

    def changed(self):
        self.changes += 1

    def turn(self, seconds=1.0):
        self.now += seconds
        self.lender.turn()

    def grant(self, pilot, nodes, names, comment, told=None, found=None):
        self.slurm.rows[pilot] = f"RUNNING|1:00:00|1:00:00|{nodes}|{comment}|None"
        for name in names:
            port = host_port(str(self.folder), name)
            host = {"node": name, "address": f"10.0.0.{name[-1]}", "port": port, "places": 4, "gpus": [0, 1, 2, 3]}
            facts = {"gpu_type": "A100", "cpus": 8.0, "memory_bytes": 0.0}
            (self.folder / "pilots" / f"{pilot}.{name}.facts").write_text(json.dumps(facts | (found or {})))
            (self.folder / "pilots" / f"{pilot}.{name}.json").write_text(json.dumps(host | (told or {})))

    @property
    def nodes(self):
        return [hosted.node.id for hosted in self.lender.hosts()]


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    bench.turn()
    return bench


def test_what_slurm_could_lend_is_offered_before_anything_is_asked_for(bench):
    assert bench.nodes == ["node1", "node2"]
    first = bench.lender.hosts()[0]
    assert (first.node.num_gpus, first.node.gpu_type) == (4, "a100")
    assert first.address == ("10.0.0.1", host_port(str(bench.folder), "node1"))
    assert bench.slurm.scripts == []


def test_a_node_is_of_the_same_type_before_and_after_its_host_is_up(bench):
    """Else no job could grow from one that is lent to one that is not, without mixing types."""
    before = {hosted.node.id: hosted.node.gpu_type for hosted in bench.lender.hosts()}
    bench.lender.ask("train", {"node1": 2})
    bench.turn()
    bench.grant("1_0", "node1", ["node1"], "train@node1", found={"gpu_type": "NVIDIA A100-SXM4-40GB"})
    bench.turn(3.0)
    assert bench.lender.is_up("node1")
    assert {hosted.node.id: hosted.node.gpu_type for hosted in bench.lender.hosts()} == before
    assert set(before.values()) == {"a100"}


def test_a_generation_asks_once_and_gets_its_places_with_the_hosts(bench):
    bench.lender.ask("train", {"node1": 2, "node2": 4})
    bench.turn()
    bench.turn()
    (script,) = bench.slurm.scripts
    assert "#SBATCH --nodelist=node[1-2]\n" in script
    assert "#SBATCH --nodes=2\n" in script
    assert f"node1=10.0.0.1:{host_port(str(bench.folder), 'node1')}," in script
    assert bench.lender.held("train") == {}
    before = [hosted.address for hosted in bench.lender.hosts()]
    bench.grant("1_0", "node[1-2]", ["node1", "node2"], "train@node[1-2]")
    changes = bench.changes
    bench.turn()
    assert bench.lender.held("train") == {"node1": (0, 1), "node2": (0, 1, 2, 3)}
    assert bench.changes > changes
    assert [hosted.address for hosted in bench.lender.hosts()] == before, "a node must not seem to be another"
    assert bench.lender.hosts()[0].gpus == (0, 1, 2, 3)


def test_nodes_are_given_back_when_nobody_wants_them(bench):
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.grant("1_0", "node1", ["node1"], "train@node1")
    bench.turn()
    assert bench.slurm.cancelled == []
    bench.lender.drop("train", {"node1": (0,)})
    bench.turn()
    assert bench.slurm.cancelled == [], "the job's next generation may want them in a moment"
    bench.turn(2.0)
    assert bench.slurm.cancelled == ["1_0"]
    bench.turn()
    assert bench.nodes == ["node2"], "its next host must not be taken for the last"
    bench.turn(10.0)
    assert bench.nodes == ["node1", "node2"]


def test_what_is_not_granted_is_cancelled_when_it_is_wanted_no_more(bench):
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.lender.ask("train", {})
    bench.turn()
    bench.turn(2.0)
    assert bench.slurm.cancelled == ["1_0"]


def test_the_next_generation_takes_over_the_nodes_of_the_last(bench):
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.grant("1_0", "node1", ["node1"], "train@node1")
    bench.turn()
    for _ in range(3):
        bench.lender.drop("train", {"node1": bench.lender.held("train")["node1"]})
        bench.turn()
        bench.lender.ask("train", {"node1": 2})
        bench.turn()
        assert bench.lender.held("train") == {"node1": (0, 1)}
    assert (len(bench.slurm.scripts), bench.slurm.cancelled) == (1, [])


def refuse(*_):
    raise BackendFailed("'sbatch' failed: Invalid account")


def test_a_refusal_is_the_jobs_and_nothing_is_asked_for_a_while(bench):
    tried: list[str] = []

    def refuse_again(script, count):
        tried.append(script)
        refuse()

    bench.slurm.submit = refuse_again
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    assert bench.lender.refusal("train") == "Slurm does not lend node1: 'sbatch' failed: Invalid account"
    assert bench.lender.warnings() == (
        "Slurm does not lend node1: 'sbatch' failed: Invalid account; Slurm is asked again in 5 s",
    )
    assert bench.nodes == [], "it would be placed on again, in vain"
    bench.lender.ask("train", {})
    bench.turn(5.0)
    assert bench.nodes == ["node1", "node2"]
    bench.lender.ask("train", {"node2": 1})
    bench.turn()
    bench.turn(6.0)
    assert (len(tried), bench.nodes) == (2, [])
    del bench.slurm.submit
    bench.lender.ask("train", {})
    bench.turn(6.0)
    bench.lender.ask("train", {"node1": 2})
    bench.turn()
    assert bench.lender.refusal("train") == ""
    assert len(bench.slurm.scripts) == 1
    assert not any("does not lend" in warning for warning in bench.lender.warnings())


def test_a_refusal_leaves_what_is_lent_already(bench):
    bench.lender.ask("one", {"node1": 1})
    bench.turn()
    bench.grant("1_0", "node1", ["node1"], "one@node1")
    bench.turn()
    bench.slurm.submit = refuse
    bench.lender.ask("two", {"node2": 1})
    bench.turn()
    assert bench.nodes == ["node1"]
    assert bench.lender.held("one") == {"node1": (0,)}


def test_a_node_that_was_asked_for_is_waited_for_while_others_have_it(bench):
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.slurm.states["node1"] = "allocated"
    bench.turn()
    assert bench.nodes == ["node1", "node2"]
    assert bench.lender.refusal("train") == ""
    bench.slurm.states["node1"] = "down"
    bench.turn()
    assert bench.lender.refusal("train") == "node 'node1' is gone"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"gpus_per_node": 4}, ["node1", "node2"]),
        ({"gpus_per_node": 8}, ["node2"]),
        ({"gpus_per_node": 4, "gres": "gpu:a100:4"}, ["node1"]),
        ({"gpus_per_node": 1, "cpus_per_node": 32}, ["node2"]),
        ({"slots": 2}, ["node1", "node2", "node3"]),
        ({"slots": 12}, ["node1", "node2"]),
        ({"slots": 12, "cpus_per_node": 6}, ["node1", "node2", "node3"]),
    ],
)
def test_a_node_with_less_than_is_asked_for_is_not_offered(tmp_path, monkeypatch, asked, names):
    slurm = PlayedSlurm()
    rows = [
        "node1|idle|gpu:a100:4|h1|16|gpu:a100:0(IDX:N/A)|0/16/0/16|none",
        "node2|idle|gpu:h100:8(S:0-1)|h2|64|gpu:h100:0(IDX:N/A)|0/64/0/64|none",
        "node3|idle|(null)|h3|8|(null)|0/8/0/8|none",
    ]
    monkeypatch.setattr(slurm, "all_nodes", lambda partition: "\n".join(rows) + "\n")
    lender = SlurmJobProvider(tmp_path / "pool", SlurmOptions(mode="job", **asked), slurm, lambda: 1000.0)
    lender.queue.folder.prepare(b"secret")
    lender.turn()
    assert [hosted.node.id for hosted in lender.hosts()] == names
    assert {hosted.node.num_gpus for hosted in lender.hosts()} == {asked.get("slots") or asked["gpus_per_node"]}


def test_who_looks_while_places_are_given_sees_all_nodes(bench, monkeypatch):
    seen: list[list[str]] = []
    take = SlotTable.take

    def looked_at(table, number):
        seen.append(bench.nodes)
        return take(table, number)

    monkeypatch.setattr(SlotTable, "take", looked_at)
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.grant("1_0", "node1", ["node1"], "train@node1")
    bench.turn()
    assert bench.lender.held("train") == {"node1": (0,)}
    assert seen
    assert all(names == ["node1", "node2"] for names in seen)


def test_a_batch_job_whose_host_never_comes_is_given_back(bench):
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.slurm.rows["1_0"] = "RUNNING|1:00:00|1:00:00|node1|train@node1|None"
    bench.turn()
    bench.turn(500.0)
    assert bench.slurm.cancelled == []
    bench.turn(200.0)
    assert bench.slurm.cancelled == ["1_0"]


def test_two_jobs_share_what_is_there(bench):
    bench.lender.ask("one", {"node1": 1})
    bench.lender.ask("two", {"node1": 2})
    bench.turn()
    assert len(bench.slurm.scripts) == 1
    bench.grant("1_0", "node1", ["node1"], "one@node1")
    bench.turn()
    assert (bench.lender.held("one"), bench.lender.held("two")) == ({"node1": (0,)}, {"node1": (1, 2)})


@pytest.mark.parametrize(("in_use", "cancelled"), [(False, ["1_0", "2_0"]), (True, [])])
def test_who_goes_gives_back_what_no_job_uses(bench, in_use, cancelled):
    bench.lender.ask("train", {"node1": 1})
    bench.lender.ask("other", {"node2": 1})
    bench.turn()
    bench.grant("1_0", "node1", ["node1"], "train@node1")
    bench.turn()
    assert bench.lender.held("train") == {"node1": (0,)}
    if not in_use:
        bench.lender.drop("train", {"node1": (0,)})
    bench.lender._leave()
    assert bench.slurm.cancelled == cancelled


def test_a_batch_job_of_which_one_node_is_faulty_is_kept_while_another_is_in_use(bench):
    bench.lender.ask("train", {"node1": 1, "node2": 1})
    bench.turn()
    bench.grant("1_0", "node[1-2]", ["node1", "node2"], "train@node[1-2]")
    bench.turn()
    assert bench.lender.held("train") == {"node1": (0,), "node2": (0,)}
    (bench.folder / "pilots" / "1_0.node2.json").unlink()
    (bench.folder / "pilots" / "1_0.node2.problem").write_text("its GPUs are not those that Slurm has")
    bench.turn()
    assert bench.lender.queue.pool.faulty == ("1_0",)
    assert bench.slurm.cancelled == [], "a job trains on node1"
    bench.lender.drop("train", {"node1": (0,), "node2": (0,)})
    bench.turn()
    assert bench.slurm.cancelled == ["1_0"]


def test_one_that_could_not_start_gives_nothing_back_on_which_jobs_may_run(bench):
    """What jobs hold is told after the start: until then the books know of none."""
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.grant("1_0", "node1", ["node1"], "train@node1")
    bench.turn()
    bench.lender.ask("other", {"node2": 1})
    bench.turn()
    later = SlurmJobProvider(bench.folder, bench.lender.options, bench.slurm, lambda: bench.now)
    later.queue.folder.prepare(b"secret")
    later.queue._read_queue()
    later._leave()
    assert bench.slurm.cancelled == ["2_0"], "only what waits"


@pytest.mark.parametrize("odd", ["", "node1|reboot_requested|gpu:a100:4|10.0.0.1|64|gpu:0|0/64/0/64|none\n"])
def test_a_new_object_offers_what_ran_before_though_no_state_is_known(bench, odd):
    """Jobs run there: who takes the node for gone ends them."""
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    # It listens on all of its addresses, and says which of them Slurm has.
    bench.grant("1_0", "node1", ["node1"], "train@node1", {"address": "0.0.0.0"}, {"address": "10.0.0.1"})
    bench.turn()
    (before,) = [hosted for hosted in bench.lender.hosts() if hosted.node.id == "node1"]
    later = SlurmJobProvider(bench.folder, bench.lender.options, bench.slurm, lambda: bench.now)
    if odd:
        bench.slurm.odd, bench.slurm.states = odd, {"node2": "mixed"}
    else:
        bench.slurm.failing = "'sinfo' did not answer within 20 s"
    later.start(b"secret", "127.0.0.1", lambda: None)
    try:
        assert [hosted for hosted in later.hosts() if hosted.node.id == "node1"] == [before]
    finally:
        later.close()
    later.turn()
    assert [hosted for hosted in later.hosts() if hosted.node.id == "node1"] == [before]


@pytest.mark.parametrize(
    ("row", "is_offered"),
    [
        ("mixed|gpu:a100:4|10.0.0.9|64|gpu:a100:0(IDX:N/A)|8/56/0/64|none", True),
        ("mixed|gpu:a100:4|10.0.0.9|64|gpu:a100:1(IDX:2)|8/56/0/64|none", False),
        ("mixed|gpu:8|10.0.0.9|64|gpu:(null):4(IDX:0,2-4)|8/56/0/64|none", True),
        ("mixed|gpu:8|10.0.0.9|64|gpu:(null):5(IDX:0,2-5)|8/56/0/64|none", False),
        ("mixed|gpu:4|10.0.0.9|64|gpu:0|60/4/0/64|none", True),
        ("mixed|gpu:4|10.0.0.9|64|gpu:0|62/2/0/64|none", False),
        ("reserved|gpu:4|10.0.0.9|64|gpu:0|0/64/0/64|none", False),
        ("idle*|gpu:4|10.0.0.9|64|gpu:0|0/64/0/64|none", False),
        ("idle~|gpu:4|10.0.0.9|64|gpu:0|0/64/0/64|none", True),
    ],
)
def test_only_what_is_left_of_a_node_can_be_lent(tmp_path, monkeypatch, row, is_offered):
    slurm = PlayedSlurm()
    monkeypatch.setattr(slurm, "all_nodes", lambda partition: f"node9|{row}\n")
    options = SlurmOptions(mode="job", gpus_per_node=4, cpus_per_node=4)
    lender = SlurmJobProvider(tmp_path / "pool", options, slurm, lambda: 1000.0)
    lender.queue.folder.prepare(b"secret")
    lender.turn()
    assert [hosted.node.id for hosted in lender.hosts()] == ["node9"] * is_offered


def test_who_asks_for_a_reservation_is_lent_its_nodes(tmp_path, monkeypatch):
    slurm = PlayedSlurm()
    slurm.states = {"node1": "reserved"}
    options = SlurmOptions(mode="job", gpus_per_node=4, words="--reservation=course")
    lender = SlurmJobProvider(tmp_path / "pool", options, slurm, lambda: 1000.0)
    lender.queue.folder.prepare(b"secret")
    lender.turn()
    assert [hosted.node.id for hosted in lender.hosts()] == ["node1"]


def test_a_node_that_slurm_does_not_lend_is_given_up_while_another_is_free(bench):
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.slurm.states["node1"] = "allocated"
    bench.slurm.rows["1_0"] = "PENDING|10:00|10:00||train@node1|Resources"
    bench.turn()
    bench.turn(50.0)
    assert bench.lender.refusal("train") == ""
    bench.turn(15.0)
    assert bench.lender.refusal("train") == (
        "Slurm has not lent node1 for 65 s (Resources), and has others to lend (node2): the job is placed anew"
    )
    assert bench.slurm.cancelled == ["1_0"]
    bench.slurm.states["node1"] = "idle"
    bench.lender.ask("train", {"node2": 1})
    bench.turn(10.0)
    assert bench.lender.refusal("train") == ""
    assert bench.nodes == ["node2"], "it would be placed there again"
    assert len(bench.slurm.scripts) == 2
    bench.turn(300.0)
    assert bench.nodes == ["node1", "node2"]


@pytest.mark.parametrize(
    ("states", "row"),
    [
        # The whole cluster is full.
        ({"node1": "allocated", "node2": "allocated"}, "PENDING|10:00|10:00||train@node1|Resources"),
        # What keeps it would keep it anywhere.
        ({"node1": "idle", "node2": "idle"}, "PENDING|10:00|10:00||train@node1|QOSGrpGRES"),
        ({"node1": "allocated", "node2": "idle"}, "PENDING|10:00|10:00||train@node1|QOSGrpGRES"),
        ({"node1": "allocated", "node2": "idle"}, "PENDING|10:00|10:00||train@node1|AssocGrpGRES"),
        (
            {"node1": "allocated", "node2": "allocated", "node3": "idle"},
            "PENDING|10:00|10:00||train@node[1-2]|Resources",
        ),
        ({"node1": "idle", "node2": "idle"}, "PENDING|10:00|10:00||train@node1|Priority"),
        # It was granted, and is being prepared.
        ({"node1": "allocated", "node2": "idle"}, "CONFIGURING|10:00|10:00|node1|train@node1|None"),
    ],
)
def test_what_would_wait_anywhere_waits_without_a_limit(bench, states, row):
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.slurm.states |= states
    bench.slurm.rows["1_0"] = row
    for _ in range(10):
        bench.turn(100.0)
    assert (bench.lender.refusal("train"), bench.slurm.cancelled) == ("", [])


def test_only_the_nodes_that_keep_a_job_waiting_are_left_alone(bench):
    bench.slurm.states |= {"node3": "idle", "node5": "idle"}
    bench.turn()
    bench.lender.ask("train", {"node1": 1, "node3": 1})
    bench.lender.ask("other", {"node3": 1})
    bench.turn()
    bench.slurm.used["node1"] = 4
    bench.slurm.rows["1_0"] = "PENDING|10:00|10:00||train@node[1,3]|Priority"
    bench.turn(30.0)
    bench.turn(60.0)
    assert "Slurm has not lent node1 for 60 s (Priority)" in bench.lender.refusal("train")
    assert bench.lender.refusal("other") != "", "it waited for the same batch job"
    assert bench.slurm.cancelled == ["1_0"]
    bench.lender.ask("train", {})
    bench.lender.ask("other", {})
    bench.turn()
    assert bench.nodes == ["node2", "node3", "node5"]


def test_no_more_leave_the_queue_than_there_are_free_nodes(bench):
    bench.slurm.states |= {"node3": "idle", "node5": "idle"}
    bench.turn()
    bench.lender.ask("one", {"node1": 1})
    bench.turn()
    bench.lender.ask("two", {"node3": 1})
    bench.turn()
    bench.slurm.states |= {"node1": "allocated", "node2": "allocated", "node3": "allocated"}
    bench.turn(100.0)
    assert bench.slurm.cancelled == ["1_0"]
    assert bench.lender.refusal("two") == ""


def over_two(bench):
    """A job with places on two nodes, which one batch job brought."""
    bench.lender.ask("train", {"node1": 2, "node2": 2})
    bench.turn()
    bench.grant("1_0", "node[1-2]", ["node1", "node2"], "train@node[1-2]")
    for name in ("node1", "node2"):
        (bench.folder / "names" / name).write_text("1_0")
    bench.turn()
    assert bench.lender.held("train").keys() == {"node1", "node2"}


def leave(bench, node):
    bench.lender.drop("train", {node: bench.lender.held("train")[node]})


def test_a_node_that_the_job_has_left_is_given_back_while_it_uses_the_others(bench):
    over_two(bench)
    leave(bench, "node2")
    bench.turn()
    assert bench.slurm.kept == [], "the next generation may want it in a moment"
    bench.turn(3.0)
    assert bench.slurm.kept == [("1_0", ["node1"])]
    assert bench.slurm.cancelled == []
    assert [path.name for path in (bench.folder / "names").iterdir()] == ["node1"]
    assert not [path.name for path in (bench.folder / "pilots").iterdir() if ".node2." in path.name]
    bench.turn()
    assert not bench.lender.is_up("node2")
    bench.turn(6.0)
    assert "node2" in bench.nodes, "it can be asked for again"
    bench.turn()
    assert len(bench.slurm.kept) == 1


def test_the_node_with_the_script_stays_until_all_are_free(bench):
    over_two(bench)
    leave(bench, "node1")
    bench.turn()
    bench.turn(3.0)
    assert bench.slurm.kept == []
    leave(bench, "node2")
    bench.turn()
    bench.turn(3.0)
    assert bench.slurm.cancelled == ["1_0"]


def test_a_node_that_cannot_be_given_back_is_told_stays_and_is_tried_again_later(bench):
    over_two(bench)
    leave(bench, "node2")
    bench.slurm.stiff = "'scontrol' did not answer within 20 s"
    bench.turn()
    bench.turn(3.0)
    assert any("node2 cannot be given back while the rest of 1_0 is used" in said for said in bench.lender.warnings())
    bench.slurm.stiff = ""
    bench.turn(10.0)
    assert bench.slurm.kept == []
    assert bench.lender.is_up("node2"), "until then it can be used"
    bench.turn(300.0)
    assert bench.slurm.kept == [("1_0", ["node1"])]
    assert bench.lender.warnings() == ()


@pytest.mark.parametrize("node", ["node2", None])
def test_nobody_is_given_a_place_on_a_node_that_is_being_given_back(bench, node):
    """Slurm's command takes its time: whoever is sent there meanwhile would start on a host that is being ended."""
    over_two(bench)
    for name in (node,) if node else ("node1", "node2"):
        leave(bench, name)
    given = []

    def meanwhile(*given_up):
        bench.lender.ask("next", {"node2": 1})
        given.append(bench.lender.held("next"))
        return real(*given_up)

    if node:
        real, bench.slurm.keep_only = bench.slurm.keep_only, meanwhile
    else:
        real, bench.slurm.cancel = bench.slurm.cancel, meanwhile
    bench.turn()
    bench.turn(3.0)
    bench.turn()
    assert given == [{}]
    assert bench.lender.held("next") == {}


def test_what_was_cancelled_is_not_lent_any_more_though_its_end_takes_a_while(bench):
    over_two(bench)
    for name in ("node1", "node2"):
        leave(bench, name)
    bench.slurm.slow = True
    bench.turn()
    bench.turn(3.0)
    assert bench.slurm.cancelled == ["1_0"]
    bench.lender.ask("next", {"node2": 1})
    bench.turn()
    assert not bench.lender.is_up("node2")
    assert bench.lender.held("next") == {}
    assert bench.slurm.kept == []


def test_a_node_that_went_though_slurm_did_not_answer_has_its_name_back(bench):
    over_two(bench)
    leave(bench, "node2")
    bench.slurm.stiff = "'scontrol' did not answer within 20 s"
    bench.turn()
    bench.turn(3.0)
    bench.slurm.rows["1_0"] = "RUNNING|1:00:00|1:00:00|node1|train@node[1-2]|None"
    bench.turn()
    assert [path.name for path in (bench.folder / "names").iterdir()] == ["node1"]
    assert bench.lender.warnings() == (), "nothing is left to be given back"
