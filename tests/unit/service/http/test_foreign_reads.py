"""Work on folders that hang leaves room for work on others, however many of them there are."""

import asyncio
import threading

import pytest

from pollux.core.errors import Unreachable
from pollux.service.http import foreign_reads as module
from pollux.service.http.foreign_reads import ThreadsToGiveUp, place_of
from pollux.testing.waiting import PATIENCE_SECONDS

MOUNTS = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /dev rw - devtmpfs udev rw
40 22 0:50 / /net rw - autofs systemd-1 rw
41 40 0:51 / /net/data rw,hard - nfs4 filer:/data rw
42 41 0:52 / /net/data/fast\\040one rw - lustre x rw
43 41 0:53 / /net/data/scratch rw - tmpfs x rw
44 22 0:54 / /home rw - nfs filer:/home rw
45 44 0:55 / /home rw - ext4 /dev/sdb rw
46 22 0:56 / /mnt/s3 rw - fuse.s3fs s3 rw
"""


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    monkeypatch.setattr(module, "_MOUNTS", str(table))
    return table


@pytest.mark.parametrize(
    ("folder", "place"),
    [
        ("/srv/a", "/srv/a"),
        ("/net/data/a/b", "/net/data"),
        ("/net/data", "/net/data"),
        ("/net/data/../data//a/", "/net/data"),
        ("/net/database", "/net"),
        ("/net/data/fast one/x", "/net/data/fast one"),
        ("/net/data/scratch/x", "/net/data/scratch/x"),
        ("/home/ann", "/home/ann"),
        ("/mnt/s3/x", "/mnt/s3"),
        ("/", "/"),
    ],
)
def test_folders_hang_with_their_network_file_system(mounts, folder, place):
    assert place_of(folder) == place


@pytest.mark.parametrize("text", ["", "nothing\n", " - \n", "1 2 3 4\n"])
def test_without_a_list_of_mounts_each_folder_counts_alone(mounts, text):
    mounts.write_text(text)
    assert place_of("/net/data/a") == "/net/data/a"
    mounts.unlink()
    assert place_of("/net/data/a/") == "/net/data/a"


async def asked(threads, keys, work):
    """What comes of work on each of these folders, all asked for at once."""
    runs = (threads.run(f"folder {number}", key, work) for number, key in enumerate(keys))
    return await asyncio.gather(*runs, return_exceptions=True)


@pytest.fixture
def held():
    over = threading.Event()
    yield lambda: over.wait(PATIENCE_SECONDS)
    over.set()


@pytest.mark.parametrize("count", [8, 16, 200])
def test_folders_below_one_dead_mount_take_two_threads(mounts, held, count):
    threads = ThreadsToGiveUp(0.3, most_threads=16)

    async def run():
        keys = [place_of(f"/net/data/job-{number % count}") for number in range(2 * count)]
        dead = asyncio.ensure_future(asked(threads, keys, held))
        await asyncio.sleep(0)
        assert await threads.run("another", place_of("/srv/a"), lambda: "read") == "read", "while the others hang"
        assert threads._running.total() <= 3
        return await dead

    assert {type(found) for found in asyncio.run(run())} == {Unreachable}


def test_hung_folders_of_which_nothing_is_known_leave_their_threads_to_others(mounts, held):
    """Such as links to a dead mount: each counts alone, until it is past its time."""
    threads = ThreadsToGiveUp(0.2, most_threads=16)

    async def run():
        for wave in range(4):
            found = await asked(threads, [f"/srv/link-{wave}-{number % 8}" for number in range(16)], held)
            assert {type(each) for each in found} == {Unreachable}
        return await threads.run("another", "/srv/a", lambda: "read")

    assert asyncio.run(run()) == "read"
    assert threads._running.total() <= 16 + module._MOST_HUNG


def test_threads_are_bounded_all_the_same(held):
    threads = ThreadsToGiveUp(0.05, most_threads=4)

    async def run():
        for wave in range(30):
            await asked(threads, [f"/srv/{wave}-{number}" for number in range(6)], held)

    asyncio.run(run())
    assert threads._running.total() == 4 + module._MOST_HUNG
