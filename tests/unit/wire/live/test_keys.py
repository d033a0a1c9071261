import pytest

from pollux.wire.live import keys
from pollux.wire.live.keys import KeyParts


@pytest.mark.parametrize("write", [keys.ready, keys.here, keys.received, keys.done, keys.saves, keys.beat, keys.ends])
def test_a_key_of_a_replica_comes_back_in_parts(write):
    assert keys.parse(write(3, 12)) == KeyParts(write.__name__, 3, 12)


@pytest.mark.parametrize("write", [keys.plan, keys.withdrawn, keys.lost, keys.handed, keys.door, keys.failed])
def test_a_key_of_a_generation_comes_back_in_parts(write):
    assert keys.parse(write(3)) == KeyParts(write.__name__, 3, None)


@pytest.mark.parametrize("key", ["", "committed", "beat", "beat/x/1", "beat/1/-1", "beat/1/2/3", "beat/" + "9" * 99])
def test_any_other_text_is_no_key_of_a_generation(key):
    assert keys.parse(key) is None
