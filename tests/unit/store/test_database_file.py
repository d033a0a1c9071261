"""Which file system a folder is on, by what the kernel says of its mounts."""

import os
from pathlib import Path

import pytest

from pollux.store import _database_file

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /net rw - nfs4 server:/net rw
31 30 8:2 / /net/me/local rw - xfs /dev/sdb rw
32 22 0:31 / /mnt/my\040disk rw - fuse.sshfs me@host: rw
33 22 0:32 / /mnt/over rw - ext4 /dev/sdc rw
34 33 0:33 / /mnt/over rw - cifs //host/share rw
35 22 0:34 / /mnt/overlay rw - fuse.fuse-overlayfs x rw
36 22 0:35 / /mnt/für\040uns rw - nfs4 server:/für rw
broken line
""".strip()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/nets", "ext4"),
        ("/net", "nfs4"),
        ("/net/me", "nfs4"),
        ("/net/me/local/x", "xfs"),
        ("/mnt/my disk/a", "fuse.sshfs"),
        ("/mnt/over/a", "cifs"),
        ("/mnt/für uns/a", "nfs4"),
    ],
)
def test_the_longest_and_latest_mount_counts(path, kind):
    assert _database_file.file_system(Path(path), MOUNTS) == kind


@pytest.mark.parametrize(("path", "fine"), [("/srv", True), ("/net/me", False), ("/mnt/my disk", False),
                                            ("/mnt/over", False), ("/mnt/overlay", True),
                                            ("/mnt/für uns", False)])  # fmt: skip
def test_network_file_systems_are_refused(path, fine, tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(os.fsencode(MOUNTS))
    monkeypatch.setattr(_database_file, "_MOUNTS", mounts)
    if fine:
        _database_file.refuse_network(Path(path))
    else:
        with pytest.raises(_database_file.InvalidInput, match="network file system"):
            _database_file.refuse_network(Path(path))


def test_where_the_system_does_not_tell_it_is_taken_to_be_local(tmp_path, monkeypatch):
    monkeypatch.setattr(_database_file, "_MOUNTS", tmp_path / "none")
    _database_file.refuse_network(tmp_path)
