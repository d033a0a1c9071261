"""What goes back to Slurm, and when."""

import pytest


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


def test_a_batch_job_whose_host_never_comes_is_given_back(bench):
    bench.lender.ask("train", {"node1": 1})
    bench.turn()
    bench.slurm.rows["1_0"] = "RUNNING|1:00:00|1:00:00|node1|train@node1|None"
    bench.turn()
    bench.turn(500.0)
    assert bench.slurm.cancelled == []
    bench.turn(200.0)
    assert bench.slurm.cancelled == ["1_0"]


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
