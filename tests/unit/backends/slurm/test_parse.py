"""What Slurm prints is read strictly: node lists, times, rows; what is none is said to be none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.backends.slurm.parse import (
    JOB_STATES,
    expand_nodes,
    fold_nodes,
    gres_count,
    gres_type,
    read_grace,
    read_nodes,
    read_pilots,
    read_seconds,
    unknown_states,
)
from pollux.core.errors import BackendFailed


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("(null)", ()),
        ("node1", ("node1",)),
        ("a,b", ("a", "b")),
        ("gpu[1-3,07],login", ("gpu1", "gpu2", "gpu3", "gpu07", "login")),
        ("r[1-2]n[08-10]", ("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10")),
        ("c[3]-ib", ("c3-ib",)),
    ],
)
def test_a_list_of_nodes_in_full(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["node[1-", "node[a-b]", "node[1-2", "no de", "node]1[", ",", "node[1-999999999]"])
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(BackendFailed):
        expand_nodes(text)


@given(
    st.sets(
        st.one_of(
            st.integers(0, 2000).map(lambda n: f"node{n}"),
            st.integers(0, 99).map(lambda n: f"rack{n:03d}"),
            st.sampled_from(["login", "gpu-a", "gpu-b"]),
        ),
        min_size=1,
    )
)
def test_folding_and_unfolding_gives_the_same_nodes(names):
    assert set(expand_nodes(fold_nodes(names))) == names


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:07", 7.0), ("12:34", 754.0), ("1:00:00", 3600.0), ("2-03:04:05", 183845.0), ("UNLIMITED", None), ("", None)],
)
def test_a_time_is_read(text, seconds):
    assert read_seconds(text) == seconds


@pytest.mark.parametrize("text", ["soon", "1:2:3:4", "-5", "1.5"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(BackendFailed):
        read_seconds(text)


PARTITIONS = """\
PartitionName=main AllowGroups=ALL Default=YES GraceTime=120 PreemptMode=REQUEUE
PartitionName=short AllowGroups=ALL Default=NO GraceTime=5 PreemptMode=REQUEUE
"""


@pytest.mark.parametrize(("plugin", "partition", "seconds"), [
    ("preempt/partition_prio", "", 150.0),
    ("preempt/partition_prio", "main", 150.0),
    ("preempt/partition_prio", "main,short", 35.0),
    ("preempt/partition_prio", "other", 30.0),
    ("preempt/none", "main", 30.0),
    ("preempt/qos", "main", 30.0),
])  # fmt: skip
def test_the_grace_is_that_of_the_partition_and_killwait(plugin, partition, seconds):
    config = f"JobRequeue              = 1\nKillWait                = 30 sec\nPreemptType             = {plugin}\n"
    assert read_grace(config, PARTITIONS, partition) == seconds


def test_a_grace_that_nobody_tells_is_not_known():
    assert read_grace("what is this", PARTITIONS, "main") is None


def test_rows_of_the_queue():
    rows, odd = read_pilots(
        "12_0|RUNNING|9:59|10:00|node[1-2]|pilot|None\n"
        "12_1|PENDING|10:00|10:00||pilot|Resources\n"
        "9|TIMEOUT|0:00|10:00|node3|(null)|TimeLimit\n\n"
    )
    assert odd == []
    running, waiting, ended = rows
    assert (running.is_held, running.nodes, running.seconds_left) == (True, ("node1", "node2"), 599.0)
    assert (waiting.is_waiting, waiting.reason, waiting.nodes) == (True, "Resources", ())
    assert (ended.has_ended, ended.comment) == (True, "")


@pytest.mark.parametrize(
    "line",
    [
        "slurm_load_jobs error: Unable to contact slurm controller",
        "12_0|is down|9:59|10:00|node1|pilot|None",
        "12_x|RUNNING|9:59|10:00|node1|pilot|None",
        "12_0|RUNNING|soon|10:00|node1|pilot|None",
        "12_0|RUNNING|9:59|10:00|node[1|pilot|None",
        "12_0|RUNNING|9:59",
    ],
)
def test_a_line_that_is_no_row_is_told_apart(line):
    rows, odd = read_pilots(f"{line}\n7|RUNNING|9:59|10:00|node1|pilot|None\n")
    assert [row.id for row in rows] == ["7"]
    assert odd == [line]


@pytest.mark.parametrize(
    ("state", "stand"),
    [
        ("idle", "held"),
        ("mixed", "held"),
        ("mixed-", "held"),
        ("allocated*", "held"),
        ("completing", "held"),
        ("unknown*", "held"),
        ("draining", "leaving"),
        ("drained*", "leaving"),
        ("failing", "leaving"),
        ("maint", "leaving"),
        ("reboot^", "leaving"),
        ("down*", "leaving"),
        ("down", "leaving"),
        ("powering_down", "leaving"),
        ("fail", "leaving"),
        ("dancing", "leaving"),
    ],
)
def test_no_state_of_a_node_makes_it_gone(state, stand):
    rows, odd = read_nodes(f"node1|{state}|gpu:a100:4(S:0-1)|10.0.0.1|64|bad fan\n")
    assert odd == []
    assert (rows["node1"].stand, rows["node1"].reason) == (stand, "bad fan")
    assert unknown_states([], rows.values()) == (["dancing"] if state == "dancing" else [])


# As squeue's manual page of Slurm 25.11 lists them, and those that earlier ones print.
PRINTED = {
    "waiting": "PENDING CONFIGURING EXPEDITING POWER_UP_NODE REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD "
    "SPECIAL_EXIT",
    "held": "RUNNING RESIZING SIGNALING UPDATE_DB",
    "leaving": "COMPLETING LAUNCH_FAILED RECONFIG_FAIL STAGE_OUT STOPPED SUSPENDED",
    "gone": "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT",
}


def row_in(state, nodes="node1"):
    (row,), odd = read_pilots(f"7_0|{state}|9:59|10:00|{nodes}|pilot|None\n")
    assert odd == []
    return row


@pytest.mark.parametrize(("state", "stand"), [(state, stand) for stand in PRINTED for state in PRINTED[stand].split()])
def test_every_state_that_slurm_prints_of_a_job(state, stand):
    row = row_in(state)
    assert row.stand == stand
    assert [row.is_waiting, row.is_held, row.has_nodes, row.has_ended] == [
        stand == "waiting", stand == "held", stand in ("held", "leaving"), stand == "gone",
    ]  # fmt: skip
    assert unknown_states([row], []) == []


def test_the_table_has_no_other_states():
    assert sorted(JOB_STATES) == sorted(" ".join(PRINTED.values()).split())


@given(st.from_regex(r"[A-Z][A-Z0-9_]{0,20}", fullmatch=True).filter(lambda state: state not in JOB_STATES))
def test_a_state_that_nobody_knows_is_leaving_and_told(state):
    assert row_in(state).stand == "leaving"
    assert unknown_states([row_in(state)], []) == [state]


@pytest.mark.parametrize("state", ["RUNNING", "LAUNCH_FAILED", "NEWEST"])
def test_what_has_no_nodes_waits_for_some(state):
    assert row_in(state, nodes="").is_waiting


@pytest.mark.parametrize(
    "line",
    [
        "node1|not there|gpu:4|10.0.0.1|64|none",
        "node1 idle",
        "|idle|gpu:4|10.0.0.1|64|none",
        "node1|12|gpu:4|10.0.0.1|64|none",
    ],
)
def test_a_line_that_is_no_node_is_told_apart(line):
    assert read_nodes(line + "\n") == ({}, [line])


def test_types_and_counts_of_generic_resources():
    assert (gres_type("gpu:a100:4(S:0-1)"), gres_count("gpu:a100:4(S:0-1)")) == ("a100", 4)
    assert (gres_type("gpu:4"), gres_count("gpu:4")) == ("", 4)
    assert (gres_type("mps:100,gpu:v100:2"), gres_count("mps:100,gpu:v100:2")) == ("v100", 2)
    assert gres_count("(null)") == 0


@given(st.text())
def test_any_text_is_read_without_a_crash(text):
    read_pilots(text)
    read_nodes(text)
