import pytest

from pollux.wire.live.codec import MalformedValue, decode, encode
from pollux.wire.live.heartbeat import Activity, Heartbeat, PauseReport, UnsupportedVersion


def test_a_heartbeat_comes_back_as_it_was_written():
    beat = Heartbeat(4, 12.5, Activity.DATA, 3.0, True, "no")
    assert Heartbeat.decode(beat.encode()) == beat


def test_a_pause_comes_back_as_it_was_written():
    pause = PauseReport(0.5, "grow", 7, 1000, {"regroup": 0.2})
    assert decode(PauseReport, encode(pause)) == pause


@pytest.mark.parametrize(
    "said",
    ["[" * 100_000, "7", '{"step": 1, "at": 0, "activity": "asleep"}', '{"step": true, "at": 0, "activity": ""}'],
)
def test_what_no_agent_writes_is_malformed(said):
    with pytest.raises(MalformedValue):
        Heartbeat.decode(said)


def test_another_version_is_refused_with_its_remedy():
    with pytest.raises(UnsupportedVersion, match=r"version 99 of the live protocol, .* install the same Pollux"):
        Heartbeat.decode('{"version": 99}')
