"""GPUs that Slurm lends are those that replicas see, each its own, also where two pilots share a node."""

from pollux.backends.slurm.backend import SlurmBackend
from pollux.core import Placement
from pollux.testing.conformance.backends import Bench

SEES = """
    import os, time
    from pathlib import Path
    me = f"{os.environ['POLLUX_JOB']}.{os.environ['RANK']}"
    Path(f"{me}.sees").write_text(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    while not Path("go").exists():
        time.sleep(0.01)
"""


def test_replicas_see_the_gpus_that_slurm_gave_their_pilot(slurm, tmp_path):
    def new(home):
        return SlurmBackend(
            home, nodes="2", gpus_per_node=2, cpus_per_node=2, partition="main", words="--exclude=node[2-3]",
            time_limit="30:00", poll_seconds=0.5, head="127.0.0.1", warm=False, pool=tmp_path / "pool",
        )  # fmt: skip

    bench = Bench(tmp_path, new)
    try:
        bench.wait("nodes", lambda: len(bench.backend.inventory()) == 2)
        one, two = (node.id for node in bench.backend.inventory())
        assert {one, two} > {"node1"}
        assert {node.num_gpus for node in bench.backend.inventory()} == {2}
        # One job has a GPU of each pilot, the others one each of what is left.
        wanted = {"wide": {one: 1, two: 1}, "left": {one: 1}, "right": {two: 1}}
        seen = {}
        for job, places in wanted.items():
            launch = bench.launch(job, SEES, 1, 1, env={"POLLUX_JOB": job})
            object.__setattr__(launch, "placement", Placement.of(places))
            bench.backend.submit(launch)
            for rank in range(len(places)):
                seen[job, rank] = bench.file(f"{job}.{rank}.sees").strip()
        assert sorted(seen.values()) == ["0", "1", "2", "3"]
        # Slurm's own books: which pilot has which devices of the node.
        text = slurm.run("scontrol", "show", "job", "-d")
        booked = sorted(line.split("GRES=gpu:2(IDX:")[1].split(")")[0] for line in text.splitlines() if "(IDX:" in line)
        assert booked == ["0-1", "2-3"]
        by_pilot = {frozenset((seen["wide", 0], seen["left", 0])), frozenset((seen["wide", 1], seen["right", 0]))}
        assert by_pilot == {frozenset("01"), frozenset("23")}
        (bench.folder / "go").touch()
        for job in wanted:
            assert bench.end(job).outcome == "succeeded"
            bench.backend.forget(job)
    finally:
        bench.backend.close()
        slurm.run("scancel", "--user=root")
        slurm.wait_for(lambda: not slurm.run("squeue", "-h"), "empty queue")
