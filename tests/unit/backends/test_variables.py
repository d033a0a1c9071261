"""The environment of replicas."""

from pathlib import Path

from pollux.backends._devices import Devices
from pollux.backends._variables import common_variables, inherited, replica_variables, run_id
from pollux.backends.protocol import Launch
from pollux.core import Node, Placement

SLOTS = Devices(Node("n", 2, "cpu"), (), (0, 1, 2, 3))
CARDS = Devices(Node("n", 3, "H200"), (4, 2, 7), (0, 1, 2, 3))


def launch(generation=3, **env):
    return Launch("job", generation, Placement.of({"n": 2}), ("python", "x.py"), "/", env)


def test_what_is_the_services_own_is_not_inherited():
    environ = {"HOME": "/h", "POLLUX_TOKEN": "secret", "POLLUX_HOME": "x", "RANK": "3", "TORCHELASTIC_RUN_ID": "x"}
    assert inherited(environ) == {"HOME": "/h"}


def test_gpus_are_those_of_the_placement_in_order():
    variables = common_variables(launch(), CARDS, (1, 2), "id")
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,7"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "OMP_NUM_THREADS" not in variables


def test_slots_show_no_gpu_and_share_the_cores():
    variables = common_variables(launch(), SLOTS, (0, 1), "id")
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["TORCHELASTIC_RESTART_COUNT"] == "2"


def test_the_job_may_set_defaults_but_not_its_place():
    variables = common_variables(
        launch(OMP_NUM_THREADS="1", WORLD_SIZE="9", CUDA_VISIBLE_DEVICES="5"), SLOTS, (0,), "i"
    )
    assert (variables["OMP_NUM_THREADS"], variables["WORLD_SIZE"]) == ("1", "1")
    assert variables["CUDA_VISIBLE_DEVICES"] == ""


def test_ranks():
    assert replica_variables(2) == {"RANK": "2", "LOCAL_RANK": "2", "ROLE_RANK": "2"}


def test_a_run_has_a_name_of_its_own():
    names = {run_id(Path(home), job, number) for home in ("/a", "/b") for job in ("x", "y") for number in (1, 2)}
    assert len(names) == 8
