import random
import struct

import pytest

from pollux.wire.live import store_channel
from pollux.wire.live.store_channel import (
    BrokenFrame,
    FrameReader,
    FrameWriter,
    StoreAccess,
    StoreOperation,
    derived_secret,
    frames,
    pack,
    proof,
    unpack,
    with_derived_secret,
)

SECRET = bytes(range(32))
KEY = b"k" * 32


def test_frames_come_out_as_they_went_in_however_they_are_cut():
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    bodies = [b"", b"one", b"x" * 5000]
    sent = b"".join(map(writer.frame, bodies))
    got = [body for at in range(0, len(sent), 7) for body in reader.feed(sent[at : at + 7])]
    assert got == bodies


@pytest.mark.parametrize("change", ["repeat", "skip", "swap", "flip", "other key", "own words"])
def test_whatever_was_not_sent_so_ends_the_connection(change):
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    first, second = writer.frame(b"first"), writer.frame(b"second")
    sent = {
        "repeat": first + first,
        "skip": second,
        "swap": second + first,
        "flip": first[:-1] + b"T",
        "other key": FrameWriter(b"l" * 32).frame(b"first"),
        # What one side says is nothing in the mouth of the other.
        "own words": frames(SECRET, b"store", b"a", b"b")[1].frame(b"first"),
    }[change]
    if change == "own words":
        reader = frames(SECRET, b"store", b"a", b"b")[0]
    with pytest.raises(BrokenFrame, match="wrong code"):
        reader.feed(sent)


def test_a_frame_is_refused_before_it_has_come_where_it_would_be_too_long():
    with pytest.raises(BrokenFrame, match="bytes"):
        FrameReader(KEY).feed(struct.pack("!I", 2**32 - 1) + bytes(32))
    with pytest.raises(BrokenFrame, match="bytes"):
        FrameWriter(KEY).frame(bytes(store_channel.MAX_FRAME_BYTES + 1))


def test_both_sides_prove_the_secret_and_neither_can_repeat_what_the_other_said():
    said = {
        proof(SECRET, b"store", b"a" * 32, b"b" * 32),
        proof(SECRET, b"replica", b"a" * 32, b"b" * 32),
        proof(SECRET, b"replica", b"b" * 32, b"a" * 32),
        proof(bytes(32), b"replica", b"a" * 32, b"b" * 32),
    }
    assert len(said) == 4
    reader, writer = frames(SECRET, b"store", b"a", b"b")
    theirs, ours = frames(SECRET, b"replica", b"a", b"b")
    assert reader.feed(ours.frame(b"question")) == [b"question"]
    assert theirs.feed(writer.frame(b"answer")) == [b"answer"]


def test_messages_are_read_as_they_were_packed():
    for parts in ([], [b""], [b"key", b"value" * 1000], [b"%d" % number for number in range(300)]):
        assert unpack(pack(StoreOperation.MULTI_SET, parts)) == (StoreOperation.MULTI_SET, parts)


@pytest.mark.parametrize(
    "body",
    [b"", b"\1", b"\0\0\0\0\0", b"\xff\0\0\0\0", b"\1\0\0\0\1\0\0\0\5abc", b"\1\xff\xff\xff\xff", b"\1\0\0\0\0more"],
)
def test_a_message_without_a_meaning_is_refused(body):
    with pytest.raises(BrokenFrame):
        unpack(body)


def test_random_bytes_are_refused_or_read_and_nothing_else():
    seeded = random.Random(5)
    for _ in range(5000):
        body = seeded.randbytes(seeded.randrange(40))
        try:
            operation, parts = unpack(body)
        except BrokenFrame:
            continue
        assert pack(operation, parts) == body


def test_a_secret_crosses_the_network_as_a_salt_only():
    secret = derived_secret(SECRET, "f00d")
    access = StoreAccess("10.0.0.1", 4000, secret)
    sent = {"POLLUX_STORE_SECRET": access.encode("f00d"), "OTHER": "1"}
    assert secret.hex() not in sent["POLLUX_STORE_SECRET"]
    own = with_derived_secret(sent, SECRET)
    assert StoreAccess.read(own) == access
    assert own["OTHER"] == "1"
    assert StoreAccess.read(with_derived_secret(sent, bytes(32))) != access
    for unchanged in ({}, {"POLLUX_STORE_SECRET": access.encode()}):
        assert with_derived_secret(unchanged, SECRET) == unchanged


def test_without_the_variable_there_is_no_store():
    assert StoreAccess.read({}) is None
    for text in ("nonsense", "h:1 00", "h:x " + "00" * 32, "h:70000 " + "00" * 32, ":1 " + "00" * 32):
        with pytest.raises(ValueError, match=r"hex|int|address|expected"):
            StoreAccess.read({"POLLUX_STORE_SECRET": text})
