import pytest

from pollux.wire.live.codec import MalformedValue, encode_tagged
from pollux.wire.live.node_messages import (
    ClearMessage,
    ExitMessage,
    NodeNoticeMessage,
    OutputMessage,
    PingRequest,
    StartReplicaRequest,
    TerminateRequest,
    decode_runner_message,
    decode_runner_request,
)


@pytest.mark.parametrize(
    "request_",
    [
        PingRequest(),
        StartReplicaRequest("1", ("python", "x.py"), "/", {"A": "b"}, (0, 1), False, 0.0, 1.0),
        TerminateRequest("1", True),
    ],
)
def test_a_request_comes_back_as_it_was_sent(request_):
    assert decode_runner_request(encode_tagged(request_)) == request_


@pytest.mark.parametrize(
    "message",
    [NodeNoticeMessage(), OutputMessage("1", b"\0\xff\n"), ExitMessage("1", -9, True, False), ClearMessage(2)],
)
def test_a_message_comes_back_as_it_was_sent(message):
    assert decode_runner_message(encode_tagged(message)) == message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '["PingRequest", {}]',
        '["OutputMessage", {"key": "1", "data": "no base64"}]',
        '["ExitMessage", {"key": "1", "code": "0", "asked": true, "lacks_memory": false}]',
        '["ClearMessage", {"number": 1, "more": 2}]',
        '["ClearMessage", {}]',
    ],
)
def test_what_is_no_message_of_the_runner_is_malformed(text):
    with pytest.raises(MalformedValue):
        decode_runner_message(text)
