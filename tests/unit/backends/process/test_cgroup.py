"""The limits of control groups, in trees as machines and containers of both versions show them."""

import math
from types import SimpleNamespace

import pytest

from pollux.backends.process import devices
from pollux.backends.process.cgroup import GroupLimits, read_limits

GIB = float(1 << 30)
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "31 23 0:27 {shown} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:28 {shown} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 23 0:29 {shown} /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer"
)
UNLIMITED_V1 = str(9223372036854771712)


@pytest.fixture
def tree(tmp_path):
    def make(groups, mounts, **files):
        for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return read_limits(tmp_path)

    return make


def test_without_groups_nothing_is_limited(tmp_path):
    assert read_limits(tmp_path) == GroupLimits(math.inf, math.inf)


def test_a_container_of_version_2(tree):
    files = {"sys/fs/cgroup/memory.max": "2147483648", "sys/fs/cgroup/cpu.max": "150000 100000"}
    assert tree("0::/", V2, **files) == GroupLimits(2 * GIB, 1.5)


def test_the_smallest_of_the_groups_around_it_counts(tree):
    files = {
        "sys/fs/cgroup/user.slice/memory.max": "1073741824",
        "sys/fs/cgroup/user.slice/cpu.max": "max 100000",
        "sys/fs/cgroup/user.slice/mine/memory.max": "max",
        "sys/fs/cgroup/user.slice/mine/cpu.max": "400000 100000",
        "sys/fs/cgroup/others/memory.max": "1",
    }
    assert tree("0::/user.slice/mine", V2, **files) == GroupLimits(GIB, 4.0)


@pytest.mark.parametrize("shown", ["/", "/docker/abc"])
def test_version_1_on_a_machine_and_in_a_container(tree, shown):
    inside = "/docker/abc" if shown == "/" else ""
    files = {
        f"sys/fs/cgroup/memory{inside}/memory.limit_in_bytes": "3221225472",
        f"sys/fs/cgroup/cpu,cpuacct{inside}/cpu.cfs_quota_us": "50000",
        f"sys/fs/cgroup/cpu,cpuacct{inside}/cpu.cfs_period_us": "100000",
        f"sys/fs/cgroup/freezer{inside}/memory.limit_in_bytes": "1",
    }
    groups = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:freezer:/docker/abc\n0::/"
    assert tree(groups, V1.format(shown=shown), **files) == GroupLimits(3 * GIB, 0.5)


def test_what_is_no_limit_and_what_cannot_be_read_limit_nothing(tree):
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    found = tree("4:memory:/gone/from/here\n3:cpu,cpuacct:/../../elsewhere\nnonsense", V1.format(shown="/"), **files)
    assert (found.memory_bytes > 1e18, found.cpus) == (True, math.inf)


@pytest.mark.parametrize(("cpus", "slots", "num_cpus"), [(2.5, 2, 2.5), (0.5, 1, 0.5), (math.inf, 8, 8.0)])
def test_a_machine_has_what_its_group_leaves_it(monkeypatch, cpus, slots, num_cpus):
    monkeypatch.setattr(devices, "read_limits", lambda: GroupLimits(GIB, cpus))
    monkeypatch.setattr(devices, "_gpus", list)
    monkeypatch.setattr(
        devices, "os", SimpleNamespace(sched_getaffinity=lambda _: set(range(8)), sysconf=lambda _: 1 << 20)
    )
    found = devices.find_devices(None, {})
    assert (found.node.num_gpus, found.node.num_cpus, found.node.memory_bytes) == (slots, num_cpus, GIB)
    assert devices.find_devices(5, {}).node.num_gpus == 5, "as asked"
