"""The environment of replicas."""

from pathlib import Path

from pollux.backends.dispatch.slots import LocalSlotAllocator
from pollux.backends.nodes.slot import Slot
from pollux.backends.process.devices import Devices
from pollux.backends.process.replica_env import common_variables, inherited, rank_variables, run_id
from pollux.backends.protocol import Launch
from pollux.core import Node, Placement

SLOTS = Devices(Node("n", 2, "cpu"), (), (0, 1, 2, 3))
CARDS = Devices(Node("n", 3, "H200"), (4, 2, 7), (0, 1, 2, 3))


def slots(*indices):
    return [Slot("", index) for index in indices]


def launch(generation=3, **env):
    return Launch("job", generation, Placement.of({"n": 2}), ("python", "x.py"), "/", env)


def test_what_is_the_services_own_is_not_inherited():
    environ = {"HOME": "/h", "POLLUX_TOKEN": "secret", "POLLUX_HOME": "x", "RANK": "3", "TORCHELASTIC_RUN_ID": "x"}
    assert inherited(environ) == {"HOME": "/h"}


def test_gpus_are_those_of_the_placement_in_order():
    details = LocalSlotAllocator(CARDS, {}).details(launch(), slots(1, 2), "id")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in details.replicas] == ["2,7", "2,7"]
    assert details.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "OMP_NUM_THREADS" not in details.environ


def test_slots_show_no_gpu_and_share_the_cores():
    details = LocalSlotAllocator(SLOTS, {"HOME": "/h"}).details(launch(), slots(0, 1), "id")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in details.replicas] == ["", ""]
    assert details.environ["OMP_NUM_THREADS"] == "2"
    assert details.environ["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert details.environ["HOME"] == "/h"


def test_the_job_may_set_defaults_but_not_its_place():
    given = launch(OMP_NUM_THREADS="1", WORLD_SIZE="9", CUDA_VISIBLE_DEVICES="5")
    details = LocalSlotAllocator(SLOTS, {}).details(given, slots(0, 1), "i")
    variables = {**details.environ, **details.replicas[1]}
    assert (variables["OMP_NUM_THREADS"], variables["WORLD_SIZE"]) == ("1", "2")
    assert variables["CUDA_VISIBLE_DEVICES"] == ""


def test_replicas_on_several_nodes_know_theirs():
    """Ranks go on over nodes; a node's first replica is its local rank 0, and its GPUs are seen in that order."""
    gpus = {"a/0": 4, "a/3": 7, "b/1": 1}
    rows = rank_variables(("a/3", "b/1", "a/0"), gpus)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("0", "0", "2", "0", "0", "7,4"),
        ("1", "0", "1", "1", "1", "1"),
        ("2", "1", "2", "0", "0", "7,4"),
    ]
    assert {row["GROUP_WORLD_SIZE"] for row in rows} == {row["POLLUX_NUM_NODES"] for row in rows} == {"2"}


def test_the_loopback_is_named_only_where_all_are_on_it():
    assert common_variables(launch(), "id")["GLOO_SOCKET_IFNAME"] == "lo"
    away = common_variables(launch(), "id", "10.0.0.1", loopback=False)
    assert "GLOO_SOCKET_IFNAME" not in away
    assert away["MASTER_ADDR"] == "10.0.0.1"


def test_a_run_has_a_name_of_its_own():
    names = {run_id(Path(home), job, number) for home in ("/a", "/b") for job in ("x", "y") for number in (1, 2)}
    assert len(names) == 8
