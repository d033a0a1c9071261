import json
import math

from pollux.backends.ray.nodes import described, lending_nodes, node_from


def row(number=1, alive=True, hostname="host.lab", labels=None, **resources):
    return {
        "NodeID": f"{number:056x}",
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": hostname,
        "Resources": resources or {"CPU": 8.0, "GPU": 4.0, "memory": 2.0**30, "accelerator_type:H100": 1.0},
        "Labels": labels or {},
    }


def test_a_node_has_its_gpus_type_cores_and_memory():
    (seen,) = lending_nodes([row()], None, True)
    node = node_from(json.loads(json.dumps(described(seen.node))))
    assert node == seen.node
    assert (node.num_gpus, node.gpu_type, node.num_cpus, node.memory_bytes) == (4, "H100", 8.0, 2.0**30)
    assert node.id == "host-lab-000001"
    assert seen.address == "10.0.0.1"
    assert not node.preemptible


def test_nodes_of_one_host_have_names_of_their_own():
    # As the nodes of Ray's own trial of its autoscaler: all but the last letters are the same.
    rows = [row(1), row(2), row(3, hostname="other")]
    names = [seen.name for seen in lending_nodes(rows, None, True)]
    assert names == ["host-lab-000001", "host-lab-000002", "other-000003"]


def test_dead_nodes_and_nodes_without_gpus_are_left_out():
    rows = [row(1, alive=False), row(2, CPU=8.0), row(3)]
    assert [seen.ray_id for seen in lending_nodes(rows, None, True)] == [rows[2]["NodeID"]]


def test_slots_are_lent_instead_of_gpus_but_no_more_than_cpus():
    found = lending_nodes([row(1, CPU=8.0, GPU=1.0), row(2, CPU=2.0)], 4, True)
    assert sorted((seen.places, seen.gpu_type) for seen in found) == [(2, "cpu"), (4, "cpu")]


def test_made_up_gpus_are_cpu_slots_unless_a_type_is_said():
    plain, typed = row(1, CPU=1.0, GPU=4.0), row(2, GPU=4.0, **{"accelerator_type:A100": 1.0})
    assert sorted(seen.gpu_type for seen in lending_nodes([plain, typed], None, False)) == ["A100", "cpu"]
    assert [seen.gpu_type for seen in lending_nodes([plain], None, True)] == ["gpu"]


def test_spot_nodes_are_preemptible():
    (seen,) = lending_nodes([row(labels={"ray.io/market-type": "spot"})], None, True)
    assert seen.preemptible


def test_odd_rows_do_no_harm():
    odd = row(hostname="")
    odd["Labels"] = odd["Resources"] = None
    assert lending_nodes([odd], None, True) == []
    (seen,) = lending_nodes([row(hostname="_ü_", GPU=1.0)], None, True)
    assert seen.name.startswith("node-")
    assert seen.node.memory_bytes == math.inf
