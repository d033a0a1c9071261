"""How a generation's end is judged from those of its replicas."""

import pytest

from pollux.backends.process.outcome import judge, said_last
from pollux.backends.protocol import Exit

NOBODY: frozenset[int] = frozenset()


def exits(*codes):
    return tuple(Exit(replica, code, float(replica)) for replica, code in enumerate(codes))


@pytest.mark.parametrize("told", [False, True])
def test_all_well_is_success_where_all_were_through_before_they_were_asked(told):
    assert judge(exits(0, 0), {}, told, NOBODY) == ("succeeded", "")


@pytest.mark.parametrize("asked", [{0}, {1}, {0, 1}])
def test_to_save_and_exit_with_0_when_asked_is_no_success(asked):
    assert judge(exits(0, 0), {}, True, NOBODY, asked=frozenset(asked)) == ("stopped", "")


def test_replicas_that_were_given_up_on_have_not_succeeded():
    assert judge(exits(0, 0), {}, False, NOBODY, asked=frozenset({0, 1})) == ("crashed", "its replicas were ended")


def test_told_to_stop_is_stopped_whatever_the_codes():
    assert judge(exits(143, -9), {}, True, NOBODY)[0] == "stopped"


def test_the_first_failure_is_the_cause():
    codes = (Exit(0, 1, 5.0), Exit(1, 2, 3.0))
    outcome, detail = judge(codes, {1: b"ValueError: x\n", 0: b"RuntimeError: peer gone\n"}, False, NOBODY)
    assert (outcome, detail) == ("crashed", "replica 1: exit code 2: ValueError: x")


def test_those_we_ended_are_no_cause():
    codes = (Exit(0, -15, 1.0), Exit(1, 2, 3.0))
    assert judge(codes, {}, False, frozenset({0}))[1] == "replica 1: exit code 2"


@pytest.mark.parametrize(
    "words",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
        "[rank1]: torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
        "MemoryError",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_words_for_lack_of_memory(words):
    tails = {0: b"RuntimeError: Connection closed by peer\n", 1: f"step 5\n{words}\n".encode()}
    codes = (Exit(0, 1, 1.0), Exit(1, 1, 2.0))
    outcome, detail = judge(codes, tails, False, NOBODY)
    assert outcome == "out-of-memory"
    assert "replica 1" in detail


def test_a_script_that_talks_of_memory_and_ends_well_has_not_run_out():
    assert judge(exits(0), {0: b"CUDA out of memory, retrying\n"}, False, NOBODY)[0] == "succeeded"


def test_killed_while_the_kernel_ran_out_of_memory():
    assert judge(exits(-9), {}, False, NOBODY, kernel_killed=True)[0] == "out-of-memory"
    assert judge(exits(-9), {}, False, NOBODY) == ("crashed", "replica 0: killed by SIGKILL")
    assert judge(exits(1), {}, False, NOBODY, kernel_killed=True)[0] == "crashed"


def test_a_limit_of_ours_says_its_numbers():
    told = "replica 0: used 200 MiB"
    assert judge(exits(-9), {}, False, NOBODY, over_memory=told) == ("out-of-memory", told)


def test_what_was_said_last():
    assert said_last(b"") == ""
    assert said_last(b"a\nb\n\n") == "b"
    assert said_last(b"Traceback\n  x\nKeyError: 'k'\nbye\n") == "KeyError: 'k'"
    assert said_last(b"[rank0]: Traceback\n[rank0]: KeyError: 'k'\n[rank0]:\n") == "KeyError: 'k'"
    assert len(said_last(b"x" * 5000)) < 400
