"""What is left in Ray by services of before: hosts with other options, and claims that nobody would give back."""

import json
import subprocess
import sys

from tests.integration.ray.conftest import wait
from tests.integration.ray.runs import backend_at

from pollux.testing.waiting import PATIENCE_SECONDS

# Groups as of a service, on two nodes; then an actor on one of them does what a host's does at its end, in a thread.
LEFT = """
import json, sys, threading
import ray
from pollux.backends.ray.node_actor import _free_groups
ray.init(address=sys.argv[1], namespace="pollux-left", log_to_driver=False)
here, there = [row["NodeID"] for row in ray.nodes() if row["Alive"] and row["Resources"].get("GPU")][:2]
def claim(name, node, gpus=1):
    selector = [{"ray.io/node-id": node}]
    return ray.util.placement_group([{"GPU": gpus}], name=name, lifetime="detached", bundle_label_selector=selector)
groups = {
    "pollux:left:job:here:1": (here, 1), "pollux:left:job:there:2": (there, 1), "pollux:other:job:here:1": (here, 1),
}
made = [claim(name, *what) for name, what in groups.items()]
claim("pollux:left:job:here:9", here, 64)
assert all(group.wait(60) for group in made)
class Ender:
    def end(self):
        thread = threading.Thread(target=_free_groups, args=("pollux:left:", "here"))
        thread.start()
        thread.join()
actor = ray.remote(Ender).options(num_cpus=0).remote()
ray.get(actor.end.remote(), timeout=60)
rows = ray.util.placement_group_table().values()
names = {*groups, "pollux:left:job:here:9"}
left = sorted(row["name"] for row in rows if row["state"] != "REMOVED" and row["name"] in names)
for name in left:
    ray.util.remove_placement_group(ray.util.get_placement_group(name))
print(json.dumps(left))
"""


def test_an_ending_host_gives_back_what_its_service_had_claimed_on_its_node(cluster):
    words = [sys.executable, "-c", LEFT, cluster.address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["pollux:left:job:there:2", "pollux:other:job:here:1"]


def has_gpus(row):
    return row["Alive"] and row["Resources"].get("GPU", 0) > 0


def test_a_host_of_other_options_is_started_anew(cluster, tmp_path):
    def hosts(**options):
        backend = backend_at(tmp_path, cluster.address, "options", warm=False, **options)
        backend.start(lambda event: None)
        places = options.get("slots", 4)

        def up():
            found = {hosted.node.id: hosted for hosted in backend._provider.hosts()}
            return {
                name: found[name].address for name in names if name in found and found[name].node.num_gpus == places
            }

        try:
            wait("hosts", lambda: len(up()) == len(names))
            return up()
        finally:
            backend.close()

    names = {f"{row['NodeManagerHostname']}-{row['NodeID'][-6:]}" for row in cluster("nodes") if has_gpus(row)}
    slots = hosts(slots=2)
    assert hosts(slots=2) == slots
    gpus = hosts()
    assert not set(gpus.values()) & set(slots.values())
