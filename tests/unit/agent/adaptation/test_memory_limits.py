"""Limits learned from what ran and what did not."""

from pollux.agent.adaptation.memory_limits import MemoryLimits


def test_nothing_is_known_at_first():
    limits = MemoryLimits("A")
    assert (limits.largest_run, limits.largest) == (0, None)


def test_back_to_the_largest_that_ran():
    limits = MemoryLimits("A")
    limits.note_run(8)
    limits.note_run(6)
    assert limits.largest_run == 8
    assert limits.note_out_of_memory(16) == 8
    assert (limits.largest_run, limits.largest) == (8, 15)


def test_half_where_nothing_ran_yet():
    limits = MemoryLimits("A")
    assert limits.note_out_of_memory(16) == 8
    assert limits.note_out_of_memory(8) == 4
    assert limits.largest == 7
    assert limits.note_out_of_memory(1) == 1


def test_what_ran_once_may_run_out_later():
    """Fragmentation, or a neighbour: the limit then falls below what had run."""
    limits = MemoryLimits("A")
    limits.note_run(8)
    assert limits.note_out_of_memory(8) == 4
    assert (limits.largest_run, limits.largest) == (0, 7)


def test_limits_are_kept_by_gpu_type():
    limits = MemoryLimits("A")
    limits.note_run(8)
    limits.note_out_of_memory(20)
    other = MemoryLimits("B")
    other.load_state_dict(limits.state_dict())
    assert (other.largest_run, other.largest) == (0, None)
    same = MemoryLimits("A")
    same.load_state_dict(limits.state_dict())
    assert (same.largest_run, same.largest) == (8, 19)
