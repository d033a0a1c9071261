"""torchrun's variables and ours, read."""

import re
from pathlib import Path

import pytest
import torch

from pollux.agent.distributed.device import choose_device, gpu_type
from pollux.agent.distributed.environment import Environment, read_environment
from pollux.core.errors import InvalidInput
from pollux.wire.environment import JOB_VARIABLES
from pollux.wire.live.store_channel import JOIN_VARIABLE, SECRET_VARIABLE, STORE_VARIABLE

REPOSITORY = Path(__file__).parents[4]


def test_without_variables_the_process_is_alone():
    assert read_environment({}) == Environment()


def test_torchrun_on_two_nodes():
    seen = read_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert (seen.replica, seen.num_replicas, seen.local_replica, seen.num_nodes) == (5, 8, 1, 2)


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({"WORLD_SIZE": "8", "RANK": "0"}, 1),
        ({"WORLD_SIZE": "8", "RANK": "0", "LOCAL_WORLD_SIZE": "3"}, 3),
        ({"WORLD_SIZE": "8", "RANK": "0", "LOCAL_WORLD_SIZE": "8"}, 1),
        ({"WORLD_SIZE": "8", "RANK": "0", "LOCAL_WORLD_SIZE": "8", "POLLUX_NUM_NODES": "4"}, 4),
        ({"WORLD_SIZE": "2", "RANK": "0", "POLLUX_NUM_NODES": "4"}, 2),
        ({}, 1),
    ],
)
def test_nodes(variables, nodes):
    assert read_environment(variables).num_nodes == nodes


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2 with WORLD_SIZE 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        ({"POLLUX_NUM_NODES": "1.5"}, "POLLUX_NUM_NODES is '1.5'"),
        ({"POLLUX_CHECKPOINT_EVERY": "often"}, "POLLUX_CHECKPOINT_EVERY is 'often'"),
        ({"POLLUX_CHECKPOINT_EVERY": "inf"}, "POLLUX_CHECKPOINT_EVERY is 'inf'"),
        ({"POLLUX_TIMEOUT": "-1"}, "POLLUX_TIMEOUT is '-1'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name_and_value(variables, words):
    with pytest.raises(InvalidInput, match=re.escape(words)):
        read_environment(variables)


def test_our_own_variables():
    seen = read_environment(
        {
            "POLLUX_JOB": "job-1",
            "POLLUX_CHECKPOINT_DIR": "a",
            "POLLUX_CHECKPOINT_EVERY": "2.5",
            "POLLUX_OUTPUT_DIR": "b",
            "POLLUX_TIMEOUT": "30",
            "POLLUX_GENERATION": "3",
            "POLLUX_URL": "http://127.0.0.1:1",
            "POLLUX_JOB_TOKEN": "t",
            "POLLUX_CA_FILE": "c.pem",
            "POLLUX_CHECKPOINT_KEEP": "4",
            "POLLUX_BATCH_SIZE": "32",
            "POLLUX_MAX_BATCH_SIZE": "64",
            "POLLUX_MAX_LOCAL_BATCH": "16",
            "POLLUX_ADAPT": "0",
            "POLLUX_STOPPED_AT": "12.5",
        }
    )
    assert seen == Environment(
        job="job-1",
        checkpoint_dir=Path("a"),
        checkpoint_every=2.5,
        output_dir=Path("b"),
        timeout=30.0,
        generation=3,
        url="http://127.0.0.1:1",
        job_token="t",
        ca_file=Path("c.pem"),
        keep_checkpoints=4,
        batch_size=32,
        max_batch_size=64,
        max_local_batch=16,
        adapts=False,
        stopped_at=12.5,
    )


def test_every_variable_that_is_read_is_listed():
    text = (REPOSITORY / "src" / "pollux" / "agent" / "distributed" / "environment.py").read_text()
    # The secret is read by the store's client, and never kept with the rest.
    others = {SECRET_VARIABLE, STORE_VARIABLE, JOIN_VARIABLE}
    assert {*re.findall(r"\"(POLLUX_[A-Z_]+)\"", text), *others} == set(JOB_VARIABLES)


def test_empty_variables_count_as_unset():
    empty = dict.fromkeys(["RANK", "WORLD_SIZE", "LOCAL_RANK", *JOB_VARIABLES], "")
    assert read_environment(empty) == Environment()


def test_the_device_asked_for_wins():
    assert choose_device("cpu", Environment()) == torch.device("cpu")
    assert gpu_type(torch.device("cpu")) == "cpu"


def test_a_gpu_each(monkeypatch):
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    place = Environment(replica=3, num_replicas=4, local_replica=1, num_nodes=2)
    assert choose_device(None, place) == torch.device("cuda", 1)
    assert choose_device("cuda:0", place) == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 1), torch.device("cuda", 0)]
    with pytest.raises(InvalidInput, match="LOCAL_RANK is 2, but this node shows 2 GPUs"):
        choose_device(None, Environment(replica=2, num_replicas=4, local_replica=2))


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_refused(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInput, match=f"device is '{device}', but PyTorch finds no GPU"):
        choose_device(device, Environment())


@pytest.mark.parametrize("device", ["toaster", "", [], 1.5, True], ids=repr)
def test_a_device_of_no_kind_is_refused(device):
    with pytest.raises(InvalidInput, match=re.escape(f"device is '{device}', which PyTorch does not know")):
        choose_device(device, Environment())


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=repr)
def test_a_device_without_values_is_refused(device):
    with pytest.raises(InvalidInput, match="device is 'meta', which holds no values"):
        choose_device(device, Environment())


def test_a_gpu_beyond_those_of_the_node_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidInput, match="device is 'cuda:2', but this node shows 2 GPUs"):
        choose_device("cuda:2", Environment())
