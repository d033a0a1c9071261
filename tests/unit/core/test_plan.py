from pollux.core import Decision, plan
from pollux.testing import cluster, job, place, snapshot


def planned(running: dict[str, str], wanted: dict[str, str]) -> list[tuple[str, str]]:
    ids = sorted({*running, *wanted})
    seen = snapshot(cluster(8, 8), [job(job_id) for job_id in ids], running)
    decision = Decision({job_id: place(text) for job_id, text in wanted.items()})
    return [(change.job_id, change.kind) for change in plan(seen, decision)]


def test_nothing_to_do():
    assert planned({"a": "n0:1"}, {"a": "n0:1"}) == []


def test_a_job_left_out_or_nowhere_is_stopped():
    assert planned({"a": "n0:1", "b": "n0:1"}, {"b": ""}) == [("a", "stop"), ("b", "stop")]


def test_frees_come_before_takes():
    running = {"b": "n0:2", "c": "n0:4", "d": "n1:2", "e": "n1:4"}
    wanted = {"a": "n0:2", "b": "n0:2 n1:2", "c": "n0:2", "d": "n0:2"}
    assert planned(running, wanted) == [
        ("e", "stop"),
        ("c", "resize"),  # only frees
        ("b", "resize"),  # also takes
        ("d", "resize"),
        ("a", "start"),
    ]


def test_equal_ranks_keep_the_order_of_the_snapshot():
    assert planned({}, {"c": "n0:1", "a": "n0:1", "b": "n0:1"}) == [
        ("a", "start"),
        ("b", "start"),
        ("c", "start"),
    ]


def test_another_order_of_nodes_is_a_move():
    assert planned({"a": "n0:1 n1:1"}, {"a": "n1:1 n0:1"}) == [("a", "resize")]


def test_a_change_says_from_where_to_where():
    seen = snapshot(cluster(4, 4), [job("a")], {"a": "n0:2"})
    (change,) = plan(seen, Decision({"a": place("n1:1")}))
    assert (change.before, change.after, change.takes) == (place("n0:2"), place("n1:1"), True)


def test_jobs_that_the_snapshot_does_not_know_are_not_planned():
    assert plan(snapshot(jobs=[job("a")]), Decision({"x": place("n0:1")})) == ()
