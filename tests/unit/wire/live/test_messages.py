import pytest

from pollux.wire.live.codec import MalformedValue
from pollux.wire.live.heartbeat import PauseReport
from pollux.wire.live.messages import (
    FleetAccess,
    LaunchOrder,
    LaunchRequest,
    LostMessage,
    ReleaseRequest,
    StartedMessage,
    StatusMessage,
    StopRequest,
    decode_message,
    encode_message,
)

ORDER = LaunchOrder(
    "job", 2, ("python", "train.py"), "/", {"A": "x" * 200_000}, ({"RANK": "0"}, {"RANK": "1"}), ((0, 1), ()),
    ("n0/0", "n1/0"), "run", False, 60.0, 0.0, "/logs", 1000, True, 30.0, {"n0/0": 3},
    FleetAccess("aa", "10.0.0.1", {"n0": ("10.0.0.2", 4000)}, 10.0, 15.0),
)  # fmt: skip
LOST = LostMessage(1.0, 3, (1,), ("0",), "it was killed")


@pytest.mark.parametrize(
    "message",
    [
        LaunchRequest(ORDER),
        StopRequest(2, 0.5),
        ReleaseRequest(),
        StatusMessage(True, 3, lost=LOST),
        StatusMessage(False, None, ended={"at": 1.0}),
        StartedMessage(1.0, 3, ("0",), PauseReport(0.5, "grow")),
        LOST,
    ],
)
def test_a_message_comes_back_as_it_was_sent(message):
    assert decode_message(encode_message(message)) == message


def test_a_shim_of_another_version_is_refused():
    with pytest.raises(MalformedValue, match="speaks version 1 of the protocol"):
        decode_message(encode_message(StatusMessage(True, 3, version=1)))


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b"{}", b'["Launch", {}]', b'["StopRequest", {"generation": 1}]', b'["StopRequest", 1]']
)
def test_a_line_that_is_no_message_is_malformed(line):
    with pytest.raises(MalformedValue):
        decode_message(line)
