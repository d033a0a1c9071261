"""What is offered: nodes whose host is up, and those that Slurm could lend."""

import pytest

from pollux.backends.nodes.slot_table import SlotTable
from pollux.backends.slurm.job_provider import SlurmJobProvider
from pollux.backends.slurm.job_requests import host_port
from pollux.backends.slurm.script import SlurmOptions


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
def test_a_node_with_less_than_is_asked_for_is_not_offered(tmp_path, slurm, monkeypatch, asked, names):
    rows = [
        "node1|idle|gpu:a100:4|h1|16|gpu:a100:0(IDX:N/A)|0/16/0/16|none",
        "node2|idle|gpu:h100:8(S:0-1)|h2|64|gpu:h100:0(IDX:N/A)|0/64/0/64|none",
        "node3|idle|(null)|h3|8|(null)|0/8/0/8|none",
    ]
    monkeypatch.setattr(slurm, "all_nodes", lambda partition: "\n".join(rows) + "\n")
    lender = SlurmJobProvider(tmp_path / "pool", SlurmOptions(mode="job", **asked), slurm, lambda: 1000.0)
    lender.queue.folder.prepare(b"secret")
    lender.do_round()
    assert [hosted.node.id for hosted in lender.hosts()] == names
    assert {hosted.node.num_gpus for hosted in lender.hosts()} == {asked.get("slots") or asked["gpus_per_node"]}


def test_who_looks_while_places_are_given_sees_all_nodes(bench, monkeypatch):
    seen: list[list[str]] = []
    take = SlotTable.allocate

    def looked_at(table, number):
        seen.append(bench.nodes)
        return take(table, number)

    monkeypatch.setattr(SlotTable, "allocate", looked_at)
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.grant("1_0", "node1", ["node1"], "train@node1")
    bench.turn()
    assert bench.lender.held("train") == {"node1": (0,)}
    assert seen
    assert all(names == ["node1", "node2"] for names in seen)


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
    later.do_round()
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
def test_only_what_is_left_of_a_node_can_be_lent(tmp_path, slurm, monkeypatch, row, is_offered):
    monkeypatch.setattr(slurm, "all_nodes", lambda partition: f"node9|{row}\n")
    options = SlurmOptions(mode="job", gpus_per_node=4, cpus_per_node=4)
    lender = SlurmJobProvider(tmp_path / "pool", options, slurm, lambda: 1000.0)
    lender.queue.folder.prepare(b"secret")
    lender.do_round()
    assert [hosted.node.id for hosted in lender.hosts()] == ["node9"] * is_offered


def test_who_asks_for_a_reservation_is_lent_its_nodes(tmp_path, slurm, monkeypatch):
    slurm.states = {"node1": "reserved"}
    options = SlurmOptions(mode="job", gpus_per_node=4, words="--reservation=course")
    lender = SlurmJobProvider(tmp_path / "pool", options, slurm, lambda: 1000.0)
    lender.queue.folder.prepare(b"secret")
    lender.do_round()
    assert [hosted.node.id for hosted in lender.hosts()] == ["node1"]
