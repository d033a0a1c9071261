import pytest

from pollux.backends.shim.store import key_values
from pollux.backends.shim.store.key_values import KeyValues, StoreRefusal


@pytest.fixture
def values():
    return KeyValues()


def test_keys_are_set_read_and_forgotten(values):
    values.set(b"a", b"1")
    values.append(b"a", b"2")
    assert values.get(b"a") == b"12"
    assert (values.has([b"a"]), values.has([b"a", b"b"]), len(values)) == (True, False, 1)
    assert (values.delete(b"a"), values.delete(b"a"), values.get(b"a")) == (True, False, None)
    assert values._bytes == 0


def test_numbers_are_counted_up(values):
    assert [values.add(b"n", 3), values.add(b"n", -5), values.get(b"n")] == [3, -2, b"-2"]
    values.set(b"n", b"much")
    with pytest.raises(StoreRefusal, match="no number"):
        values.add(b"n", 1)
    with pytest.raises(StoreRefusal, match="64 bits"):
        values.add(b"m", 2**63)


def test_a_value_is_written_where_the_expected_one_is(values):
    assert values.compare_set(b"k", b"other", b"new") == b"other"
    assert values.get(b"k") is None
    assert values.compare_set(b"k", b"", b"first") == b"first"
    assert values.compare_set(b"k", b"", b"second") == b"first"
    assert values.compare_set(b"k", b"first", b"second") == b"second"


def test_those_who_wait_are_told_once_when_all_is_there(values):
    told = []
    assert values.wait([], lambda: told.append("nothing")) is None
    values.set(b"a", b"")
    assert values.wait([b"a"], lambda: told.append("there")) is None
    values.wait([b"a", b"b", b"c"], lambda: told.append("abc"))
    late = values.wait([b"b", b"d"], lambda: told.append("late"))
    values.set(b"b", b"")
    assert told == []
    values.forget(late)
    values.set(b"c", b"")
    values.set(b"d", b"")
    values.set(b"c", b"again")
    assert told == ["abc"]
    assert values._waiters == {}


def test_there_is_room_for_so_much_and_no_more(values, monkeypatch):
    monkeypatch.setattr(key_values, "_MAX_BYTES", 100)
    monkeypatch.setattr(key_values, "_MAX_KEYS", 2)
    monkeypatch.setattr(key_values, "MAX_VALUE_BYTES", 80)
    with pytest.raises(StoreRefusal, match="a value of 81 bytes"):
        values.set(b"a", bytes(81))
    with pytest.raises(StoreRefusal, match="a key of 4097 bytes"):
        values.set(bytes(4097), b"")
    values.set(b"a", bytes(80))
    values.set(b"a", bytes(70))
    values.set(b"b", bytes(20))
    with pytest.raises(StoreRefusal, match="full"):
        values.append(b"b", bytes(10))
    with pytest.raises(StoreRefusal, match="full"):
        values.set(b"c", b"")
    values.delete(b"a")
    values.set(b"c", b"")
    assert values._bytes == 22
