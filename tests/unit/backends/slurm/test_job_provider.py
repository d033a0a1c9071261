"""Nodes come when jobs want them, and stay while jobs use them."""

import pytest

from pollux.backends.slurm.job_provider import SlurmJobProvider
from pollux.backends.slurm.job_requests import host_port


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
    bench.lender._give_back_unused()
    assert bench.slurm.cancelled == cancelled


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
    later._give_back_unused()
    assert bench.slurm.cancelled == ["2_0"], "only what waits"
