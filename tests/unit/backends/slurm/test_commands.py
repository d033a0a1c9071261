"""Slurm's commands, played by small scripts: those that hang, fail, are not there, or say something else."""

import os
import shlex
import socket
import stat
from pathlib import Path

import pytest

from pollux.backends.slurm.commands import SlurmCommands
from pollux.core.errors import BackendFailed
from pollux.testing.waiting import wait_until


@pytest.fixture
def commands(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    write.folder, write.quoted = tmp_path, shlex.quote(str(tmp_path))
    return write


@pytest.fixture
def calls(commands, monkeypatch):
    path = f"{commands.folder}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    return SlurmCommands({"PATH": path, "SLURM_CONF": "here", "SLURM_JOB_ID": "7", "SBATCH_PARTITION": "x"}, 60.0)


def test_output_is_handed_on(commands, calls):
    commands("squeue", 'echo "$@"')
    said = calls.jobs("pollux-1").split()
    assert "--name=pollux-1" in said
    assert f"--user={os.getuid()}" in said


def test_an_allocation_around_the_service_is_not_passed_on(commands, calls):
    commands("sinfo", "env")
    said = calls.nodes(["node1"])
    assert "SLURM_CONF=here" in said
    assert "SLURM_JOB_ID" not in said
    assert "SBATCH_PARTITION" not in said


def test_nodes_are_asked_for_in_one_short_word(commands, calls):
    commands("sinfo", 'echo "$@"')
    assert "--nodes=node[0-9],node[10-99],node[100-999]" in calls.nodes([f"node{number}" for number in range(1000)])


def test_a_command_that_hangs_is_ended_with_all_it_started(commands, calls):
    commands("squeue", f"sleep 600 & echo $! > {commands.quoted}/pid; wait")
    quick = SlurmCommands({"PATH": os.environ["PATH"]}, 1.0)
    with pytest.raises(BackendFailed, match="did not answer within 1 s"):
        quick.jobs("any")
    stat_file = Path(f"/proc/{(commands.folder / 'pid').read_text().strip()}/stat")

    def has_ended():
        # Whoever adopts it may not have looked after it yet.
        return not stat_file.exists() or stat_file.read_text().rpartition(")")[2].split()[0] in "ZX"

    wait_until("the end of what it started", has_ended)


@pytest.mark.parametrize(
    ("configured", "is_munge"),
    [
        ("AuthType=auth/munge\nAuthInfo=socket={socket}\n", True),
        ("# AuthType=auth/slurm\n authinfo = ttl=60,socket={socket}\n", True),
        ("AuthType=auth/slurm\nAuthInfo=socket={socket}\n", False),
        ("AuthInfo=socket={socket}.elsewhere\n", False),
        (None, False),
    ],
)
def test_a_command_that_waits_for_a_munge_that_died_says_so(commands, configured, is_munge, monkeypatch):
    """It tries for longer than we wait, and would say so itself only then."""
    # A socket's path is short, and Slurm's configuration has no blanks in one: neither is sure of a folder of tests.
    monkeypatch.chdir(commands.folder)
    path = Path("munge")
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    if configured is not None:
        (commands.folder / "conf").write_text(configured.format(socket=path))
    commands("squeue", "sleep 600")
    waiting = SlurmCommands(
        {"PATH": f"{commands.folder}:{os.environ['PATH']}", "SLURM_CONF": f"{commands.folder}/conf"}, 0.2
    )
    with pytest.raises(BackendFailed) as refused:
        waiting.jobs("any")
    text = str(refused.value)
    assert text.startswith("'squeue' did not answer within 0.2 s and was ended; ")
    assert (f"nobody answers at munge's socket {path}; authentication is refused: is munge running" in text) is is_munge
    assert ("is slurmctld up and reachable?" in text) is not is_munge


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(BackendFailed, match="'scancel' cannot be run"):
        SlurmCommands({"PATH": str(tmp_path)}, 60.0).cancel(["1"])


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "is slurmctld up"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", "account="),
        ("sbatch: error: invalid partition specified: gpuu", "partition="),
        ("auth/munge: _decode_cred: Munge decode failed: Invalid credential", "munge"),
        ("sbatch: error: AssocMaxSubmitJobLimit", "quota"),
    ],
)
def test_a_refusal_comes_with_its_words_and_a_remedy(commands, calls, complaint, remedy):
    commands("sbatch", f"cat > /dev/null; echo '{complaint}' >&2; exit 1")
    with pytest.raises(BackendFailed) as refused:
        calls.submit("#!/bin/sh", 1)
    assert complaint in str(refused.value)
    assert remedy in str(refused.value)


_POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size "
    "and/or time limits)"
)
_NO_SUCH_TIME = (
    "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)"
)
_NO_CONFIGURATION = """\
sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source"""
_NO_MUNGE = """\
sbatch: error: If munged is up, restart with --num-threads=10
sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory (Did you \
start munged?)
sbatch: error: slurm_send_node_msg: auth_g_create: REQUEST_SUBMIT_BATCH_JOB has authentication error
sbatch: error: Batch job submission failed: Protocol authentication error"""


@pytest.mark.parametrize(
    ("complaint", "shown", "remedy"),
    [
        (f"sbatch: error: AssocGrpSubmitJobsLimit\n{_POLICY}", "AssocGrpSubmitJobsLimit", "shares with others"),
        (f"sbatch: error: QOSGrpNodeLimit\n{_POLICY}", "QOSGrpNodeLimit", "shares with others"),
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{_POLICY}", "AssocMaxSubmitJobLimit", "quota of jobs"),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{_POLICY}", "QOSMaxSubmitJobPerUserLimit", "quota of jobs"),
        (f"sbatch: error: QOSMaxGRESPerUser\n{_POLICY}", "QOSMaxGRESPerUser", "another qos="),
        (f"sbatch: error: AssocMaxNodePerJobLimit\n{_POLICY}", "AssocMaxNodePerJobLimit", "another account="),
        (f"sbatch: error: QOSMinGRES\n{_POLICY}", "QOSMinGRES", "asks for less"),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{_POLICY}", "QOSMaxWallDurationPerJobLimit", "time_limit="),
        (f"sbatch: a word of the site\nsbatch: error: QOSMinGRES\n{_POLICY}", "QOSMinGRES", "asks for less"),
        (_POLICY, "accounting/QOS policy", "sacctmgr show associations"),
        (_NO_MUNGE, "No such file or directory (Did you start munged?)", "is munge running here"),
        ("slurm_load_jobs error: Protocol authentication error", "authentication", "munge"),
        ("slurm_load_jobs error: Zero Bytes were transmitted or received", "Zero Bytes", "munge"),
        (_NO_CONFIGURATION, "Could not establish a configuration source", "SLURM_CONF"),
        (_NO_SUCH_TIME, "time limit", "check time_limit="),
    ],
)
def test_what_slurm_says_in_several_lines_keeps_the_one_that_counts(commands, calls, complaint, shown, remedy):
    (commands.folder / "said").write_text(complaint + "\n")
    commands("sbatch", f"cat > /dev/null; cat {commands.quoted}/said >&2; exit 1")
    with pytest.raises(BackendFailed) as refused:
        calls.submit("#!/bin/sh", 1)
    text = str(refused.value)
    assert shown in text
    assert complaint.splitlines()[-1].split(": ", 1)[1] in text
    assert remedy in text
    assert ("time_limit=" in text) is (remedy in ("time_limit=", "check time_limit="))
    assert "\n" not in text


def test_a_submission_gives_its_number(commands, calls):
    commands("sbatch", f"cat > {commands.quoted}/script; echo '4711;lab'")
    assert calls.submit("#!/bin/sh\necho hello\n", 2) == "4711"
    assert (commands.folder / "script").read_text() == "#!/bin/sh\necho hello\n"
    commands("sbatch", "cat > /dev/null; echo Submitted batch job 5")
    with pytest.raises(BackendFailed, match="instead of a job's number"):
        calls.submit("#!/bin/sh", 1)


def test_many_are_cancelled_in_few_commands(commands, calls):
    commands("scancel", f"echo $# >> {commands.quoted}/counts")
    calls.cancel([str(number) for number in range(450)])
    assert (commands.folder / "counts").read_text().split() == ["201", "201", "51"]
