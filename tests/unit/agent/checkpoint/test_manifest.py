"""The manifest: what is written comes back, every changed byte is noticed, differences are named."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.checkpoint.manifest import (
    FORMAT,
    MANIFEST_NAME,
    FileDigest,
    Manifest,
    decode,
    digest_file,
    encode,
    frozen_json,
    read_manifest,
    require_same_signature,
    verify_files,
)
from pollux.core.errors import CheckpointDamaged, CheckpointMismatch, InvalidInput

MANIFEST = Manifest(
    format=FORMAT,
    pollux="0.1.0",
    torch="2.6.0",
    created="2026-01-02T03:04:05+00:00",
    step=12,
    num_replicas=3,
    values={"batch": 128, "noise": [1.5, float("inf")], "none": None},
    signature={"parameter": {"layer.weight": "[10, 32] float32"}},
    tied={"b": "a"},
    files={"__0_0.distcp": FileDigest(10, "ab" * 32)},
)


def test_comes_back_as_it_was():
    assert decode(encode(MANIFEST)) == MANIFEST


def test_is_one_json_object_that_others_can_read():
    entries = json.loads(encode(MANIFEST))
    assert entries["step"] == 12
    assert entries["files"]["__0_0.distcp"]["size"] == 10
    assert len(entries["checksum"]) == 64


@given(position=st.integers(0, len(encode(MANIFEST)) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed(position, flip):
    content = bytearray(encode(MANIFEST))
    content[position] ^= flip
    with pytest.raises(CheckpointDamaged, match="checksum"):
        decode(bytes(content))


@given(st.integers(0, len(encode(MANIFEST)) - 1))
def test_any_truncation_is_noticed(length):
    with pytest.raises(CheckpointDamaged):
        decode(encode(MANIFEST)[:length])


def test_another_format_is_not_damage():
    later = dataclasses.replace(MANIFEST, format=FORMAT + 1, pollux="9.9")
    with pytest.raises(CheckpointMismatch, match=rf"format {FORMAT + 1}, written by pollux 9\.9"):
        decode(encode(later))


def test_reading_names_the_folder(tmp_path):
    with pytest.raises(CheckpointDamaged, match=f"{tmp_path}.*No such file"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(b"{}")
    with pytest.raises(CheckpointDamaged, match=f"{tmp_path}.*checksum"):
        read_manifest(tmp_path)


def test_files_are_verified_by_presence_size_and_content(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"0123456789")
    files = {"data": digest_file(path)}
    assert files["data"].size == 10
    verify_files(tmp_path, files)
    verify_files(tmp_path, files, from_disk=True)
    path.write_bytes(b"0123456780")
    with pytest.raises(CheckpointDamaged, match=r"data.*SHA-256"):
        verify_files(tmp_path, files)
    path.write_bytes(b"012345678")
    with pytest.raises(CheckpointDamaged, match=r"data.*9 bytes, 10 were written"):
        verify_files(tmp_path, files)
    path.unlink()
    with pytest.raises(CheckpointDamaged, match=r"data.*No such file"):
        verify_files(tmp_path, files)


def test_values_are_copied_as_json_gives_them_back():
    inner = [1, 2]
    frozen = frozen_json("value", {"a": inner, "b": (1, 2)})
    inner.append(3)
    assert frozen == {"a": [1, 2], "b": [1, 2]}


def test_a_value_that_json_cannot_hold_is_named():
    with pytest.raises(InvalidInput, match=r"value 'rng' cannot go.*objects"):
        frozen_json("value", {"fine": 1, "rng": {1, 2}})  # type: ignore[dict-item]


def test_equal_signatures_fit_in_whatever_order():
    require_same_signature({"a": 1, "b": {"x": [1, 2], "y": 2}}, {"b": {"y": 2, "x": (1, 2)}, "a": 1})


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (
            {"parameter": {"layer1.weight": "[1]", "layer2.weight": "[10, 64]"}},
            {"parameter": {"layer1.weight": "[1]", "layer2.weight": "[10, 32]"}},
            r"parameter layer2\.weight is \[10, 64\] in the checkpoint, \[10, 32\] in the model",
        ),
        ({"parameter": {"a": 1}}, {"parameter": {}}, "parameter a is in the checkpoint but not in the model"),
        ({"parameter": {}}, {"parameter": {"a": 1}}, "parameter a is in the model but not in the checkpoint"),
        ({"optimizer": "SGD"}, {"optimizer": "AdamW"}, "optimizer is SGD in the checkpoint, AdamW in the model"),
        ({"optimizer": None}, {}, "optimizer is in the checkpoint but not in the model"),
    ],
)
def test_the_first_difference_is_named(saved, here, message):
    with pytest.raises(CheckpointMismatch, match=message):
        require_same_signature(saved, here)
