"""Sentences come from the reason alone: its word, its numbers, its names."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest

import pollux.controller
import pollux.policies
from pollux.controller.explanations.explain import CODES, explain
from pollux.controller.machine.retries import decide_retry
from pollux.core import Reason
from pollux.policies import create
from pollux.testing import SaturatingGoodput, cluster, job, snapshot

SHRANK = Reason(
    "shrank",
    {
        "gpus_before": 8.0, "gpus_after": 4.0, "fair_gpus": 5.25, "restart_factor": 0.75, "speedup_before": 1.32,
        "speedup_after": 1.0, "min_gpus": 1.0, "max_gpus": 16.0, "other_gpus_before": 0.0, "other_gpus_after": 4.0,
        "other_speedup_before": 0.0, "other_speedup_after": 0.9,
    },
    ("job-51", "job-7"),
)  # fmt: skip


def test_a_job_that_shrank_hears_why_for_whom_and_what_to_do():
    text, next_step = explain(SHRANK, "job-42")
    assert text == (
        "shrunk 8→4: your speed-up from 4 to 8 GPUs is 1.32×; job-51 went 0→4, 0.9× what its fair share gives "
        "(also job-7); fair share 5.25 GPUs, you hold 4; limits 1..16 (restart factor 0.75)"
    )
    assert next_step == "pollux resize job-42 --gpus 8..16"


def test_who_is_stopped_for_others_is_promised_only_what_it_saved():
    text, _ = explain(SAMPLES["preempted"], "resnet18")
    assert "keeps its checkpoints" in text
    assert "a script that saves nothing starts from the beginning" in text


def test_a_job_of_which_nothing_was_decided():
    assert explain(None, "a") == ("waits for the next decision", "pollux show a")


def test_a_record_names_itself(desk):
    desk.submit(0, "a", "b")
    desk.decide(10, a="n0:4")
    record = desk.controller.jobs["a"]
    assert explain(record.reason, record) == ("started on 4 GPUs", "pollux logs -f a")


SAMPLES = {
    "started": Reason("started", {"gpus_before": 0.0, "gpus_after": 2.0, "speedup_after": 1.5, "fair_gpus": 2.0}),
    "grew": Reason("grew", {"gpus_before": 2.0, "gpus_after": 4.0, "speedup_before": 1.0, "speedup_after": 1.7}),
    "shrank": SHRANK,
    "moved": Reason("moved", {"gpus_before": 4.0, "gpus_after": 4.0, "speedup_before": 1.0, "speedup_after": 1.1}),
    "preempted": replace(SHRANK, code="preempted", numbers={**SHRANK.numbers, "gpus_after": 0.0}),
    "waits-for-gpus": Reason("waits-for-gpus", {"gpus": 4.0, "free_gpus": 1.0, "gpus_before": 0.0}, ("a", "b")),
    "waits-for-quota": Reason("waits-for-quota", {"gpus": 4.0, "quota_left": 2.0}, ("a",)),
    "no-room": Reason("no-room", {"gpus": 4.0, "free_gpus": 5.0, "max_gpus": 8.0}, ("a",)),
    "behind-another": Reason("behind-another", {"gpus": 4.0}, ("a",)),
    "fits-nowhere": Reason("fits-nowhere", {"gpus": 40.0}),
    "fits-nowhere, by number": Reason("fits-nowhere", {"gpus": 40.0, "suitable_gpus": 8.0}),
    "fits-nowhere, by type": Reason(
        "fits-nowhere", {"gpus": 1.0, "suitable_gpus": 0.0, "wanted_type:h100": 0.0, "other_type:t4": 8.0}
    ),
    "fits-nowhere, by CPUs": Reason(
        "fits-nowhere", {"gpus": 1.0, "suitable_gpus": 0.0, "cpus_per_gpu": 64.0, "largest_node_cpus": 2.0}
    ),
    "fits-nowhere, by memory": Reason(
        "fits-nowhere",
        {"gpus": 2.0, "suitable_gpus": 1.0, "memory_bytes_per_gpu": 800.0, "largest_node_memory_bytes": 900.0},
    ),
    "fits-nowhere, by nodes": Reason("fits-nowhere", {"gpus": 6.0, "suitable_gpus": 4.0, "max_nodes": 1.0}),
    "fits-nowhere, by quota": Reason("fits-nowhere", {"gpus": 3.0, "queue_quota": 2.0}),
    "grew, assumed": Reason(
        "grew",
        {"gpus_before": 1.0, "gpus_after": 2.0, "speedup_before": 1.0, "speedup_after": 2.0, "speedup_assumed": 1.0},
    ),
    "moved, assumed": Reason(
        "moved",
        {"gpus_before": 2.0, "gpus_after": 2.0, "speedup_before": 1.0, "speedup_after": 1.0, "speedup_assumed": 1.0},
    ),
    "shrank, for an assumed gain": replace(SHRANK, numbers={**SHRANK.numbers, "other_speedup_assumed": 1.0}),
    "backoff-free-gpus": Reason("backoff-free-gpus", {"crashes": 3.0, "wait_seconds": 250.0}),
    "backoff": Reason("backoff", {"crashes": 2.0, "retries": 3.0, "backoff_seconds": 4.0}),
    "backoff-memory": Reason(
        "backoff-memory", {"crashes": 2.0, "retries": 3.0, "backoff_seconds": 4.0, "local_batch_max": 64.0}
    ),
    "crashed": Reason("crashed", {"crashes": 4.0, "retries": 3.0}),
    "out-of-memory": Reason("out-of-memory", {"crashes": 4.0, "retries": 3.0, "local_batch_max": 8.0}),
    "lost": Reason("lost", {"losses": 2.0, "most_losses": 10.0}),
    "refused": Reason("refused", {"refusals": 3.0, "backoff_seconds": 4.0}),
    "refused, while it runs": Reason(
        "refused", {"refusals": 1.0, "backoff_seconds": 1.0, "gpus_before": 4.0, "gpus_after": 2.0}
    ),
    "fell-back": Reason("fell-back", {"gpus_before": 2.0}),
    "left-node": Reason("left-node", {"gpus_before": 4.0, "gpus_after": 2.0}),
    "replicas-lost": Reason("replicas-lost", {"gpus_before": 4.0, "gpus_after": 3.0}),
    "stopped": Reason("stopped", {"gpus_before": 2.0}),
    "node-lost": Reason("node-lost", {"gpus_before": 2.0}),
    "paused": Reason("paused", {"gpus_before": 2.0}),
    "resumed": Reason("resumed"),
    "cancelled": Reason("cancelled", {"gpus_before": 2.0}),
    "time-limit": Reason("time-limit", {"limit_seconds": 60.0, "held_seconds": 61.0}),
    "waits-for-job": Reason("waits-for-job", jobs=("a", "b")),
    "dependency-failed": Reason("dependency-failed", jobs=("a",)),
    "succeeded": Reason("succeeded"),
    "failed": Reason("failed"),
    "a-code-of-somebody-else": Reason("a-code-of-somebody-else", {"magic": 7.0}, ("a",)),
}


def test_every_code_has_a_sample():
    assert set(CODES) | {"a-code-of-somebody-else"} == {reason.code for reason in SAMPLES.values()}


def test_what_a_job_lacks_is_told_with_what_there_is():
    told = {name: explain(reason, "a") for name, reason in SAMPLES.items() if name.startswith("fits-nowhere, ")}
    assert told == {
        "fits-nowhere, by number": (
            "cannot start here now: it needs 40 GPUs, and there are 8", "pollux resize a --gpus 1..8"
        ),
        "fits-nowhere, by type": (
            "cannot start here now: it needs 1 GPU of type h100, and there are none (here: 8 of type t4)",
            "pollux cancel a",
        ),
        "fits-nowhere, by CPUs": (
            "cannot start here now: it needs 64 CPUs per GPU, and the largest node has 2", "pollux cancel a"
        ),
        "fits-nowhere, by memory": (
            "cannot start here now: it needs 800 B of memory per GPU, and the largest node has 900 B: "
            "room for 1 of the 2 GPUs that it needs",
            "pollux resize a --gpus 1..1",
        ),
        "fits-nowhere, by nodes": (
            "cannot start here now: it needs 6 GPUs on at most 1 node, and the largest node has 4",
            "pollux resize a --gpus 1..4",
        ),
        "fits-nowhere, by quota": (
            "cannot start here now: it needs 3 GPUs, and the quota of its queue is 2", "pollux resize a --gpus 1..2"
        ),
    }  # fmt: skip


def test_sizes_in_units_that_people_read():
    numbers = {
        "gpus": 1.0, "suitable_gpus": 0.0, "memory_bytes_per_gpu": 900 * 2.0**40,
        "largest_node_memory_bytes": 1.5 * 2**30,
    }  # fmt: skip
    text = explain(Reason("fits-nowhere", numbers), "a")[0]
    assert text == "cannot start here now: it needs 900 TiB of memory per GPU, and the largest node has 1.5 GiB"


def test_a_speed_up_that_nobody_measured_is_said_to_be_taken_so():
    assert explain(SAMPLES["grew, assumed"], "a")[0] == (
        "grew 1→2: your speed-up from 1 to 2 GPUs is taken as 2× until it reports"
    )


@pytest.mark.parametrize("code", SAMPLES)
def test_every_number_and_every_name_is_in_the_text(code):
    reason = SAMPLES[code]
    text, next_step = explain(reason, "mine")
    assert next_step.startswith("pollux ")
    for name, number in reason.numbers.items():
        altered = replace(reason, numbers={**reason.numbers, name: number + 3.0})
        assert explain(altered, "mine")[0] != text, f"{name} could be anything"
    for i in range(len(reason.jobs)):
        altered = replace(reason, jobs=(*reason.jobs[:i], "somebody", *reason.jobs[i + 1 :]))
        assert explain(altered, "mine")[0] != text


@pytest.mark.parametrize("code", SAMPLES)
def test_numbers_that_are_missing_are_no_error(code):
    reason = SAMPLES[code]
    for name in reason.numbers:
        left = {other: number for other, number in reason.numbers.items() if other != name}
        assert all(explain(replace(reason, numbers=left, jobs=()), "mine"))
    assert all(explain(Reason(code), "mine"))


@pytest.mark.parametrize("package", [pollux.controller, pollux.policies])
def test_no_code_is_forgotten(package):
    """Every word that a `Reason(...)` in these rooms begins with has a sentence."""
    words = set()
    for path in Path(inspect.getfile(package)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Reason" and node.args:
                words |= {
                    part.value
                    for part in ast.walk(node.args[0])
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
    assert words
    assert words <= set(CODES)


@pytest.mark.parametrize("policy", ["pollux", "pollux-genetic", "fifo", "las", "tiresias"])
def test_what_policies_say_of_a_full_cluster_can_be_told(policy):
    model = SaturatingGoodput(knee=4.0)
    jobs = [job(f"j{i}", goodput=model, largest_gpus=8, min_gpus=1 + i, max_gpus=16) for i in range(6)]
    reasons = create(policy).allocate(snapshot(cluster(4, 4), jobs, {"j0": "n0:4", "j1": "n1:4"})).reasons
    assert reasons
    for job_id, reason in reasons.items():
        assert reason.code in CODES
        text, next_step = explain(reason, job_id)
        assert "?" not in text
        assert next_step.startswith("pollux ")


def test_what_the_controller_says_of_a_crash_can_be_told(desk):
    desk.submit(0, "a", retries=1)
    desk.decide(10, a="n0:1")
    record = desk.controller.jobs["a"]
    for outcome in ("crashed", "out-of-memory", "lost", "stopped"):
        retry = decide_retry(record, pollux.controller.GenerationEnded(20, "a", 1, outcome))
        assert "?" not in explain(retry.reason, "a")[0]
