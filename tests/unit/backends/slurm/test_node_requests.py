"""What Slurm refuses, and what is taken back since it waits for nodes while others are free."""

import pytest

from pollux.core.errors import BackendFailed


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
        "Slurm has not lent node1 for 65 s (Resources), and has others to lend (node2): the job is placed again"
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
