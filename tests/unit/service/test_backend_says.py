"""What a backend may refuse at a submission, and say of its state, where it does such things."""

import pytest

from pollux.backends.slurm.backend import SlurmBackend
from pollux.core.errors import InvalidInput, WorkdirMissing
from pollux.service.engine.launch import folders_of
from pollux.store.protocol import TelemetryRow
from pollux.testing.servers.service import result_of
from pollux.wire.job import CheckpointRequest, JobRequest


def request(home, **more):
    return JobRequest(name="job", run=("true",), workdir=str(home), **more)


def test_a_job_whose_folder_is_not_on_the_nodes_is_refused(world, tmp_path):
    asked = []

    def refuses(folders):
        asked.append(folders)
        return "folder '/x' is not the same on node 'b' as here"

    world.engine.admission.check(request(tmp_path))
    world.backend.refuses = refuses
    with pytest.raises(InvalidInput, match="not the same on node 'b'") as refused:
        world.engine.admission.check(request(tmp_path))
    assert type(refused.value) is InvalidInput, "the home is not on the nodes either"
    assert asked[0] == folders_of(request(tmp_path), tmp_path)
    world.backend.refuses = lambda folders: ""
    world.engine.admission.check(request(tmp_path))


@pytest.mark.parametrize(
    ("unseen", "kind"),
    [("work", WorkdirMissing), ("checkpoints", InvalidInput), ("home", InvalidInput)],
)
def test_that_sending_the_folder_would_help_is_said_where_it_would(world, tmp_path, unseen, kind):
    work = tmp_path / "work"
    work.mkdir()
    bad = {"work": [str(work)], "checkpoints": ["/kept"], "home": [str(work), str(tmp_path)]}[unseen]
    world.backend.refuses = lambda folders: "not the same" if {*folders} & {*bad} else ""
    with pytest.raises(InvalidInput) as refused:
        world.engine.admission.check(request(work, checkpoint=CheckpointRequest(dir="/kept")))
    assert type(refused.value) is kind
    assert ("--ship" in str(refused.value)) == (kind is WorkdirMissing)


def test_a_folder_that_is_not_here_or_is_without_the_script_has_a_code_of_its_own(world, tmp_path):
    with pytest.raises(WorkdirMissing, match=r"does not exist: .*--ship"):
        world.engine.admission.check(request(tmp_path / "gone"))
    script = JobRequest(name="job", run=("python", "gone.py"), workdir=str(tmp_path))
    with pytest.raises(WorkdirMissing, match=r"there is no gone\.py in .*--ship"):
        world.engine.admission.check(script)
    with pytest.raises(WorkdirMissing, match=r"there is no command \./gone\.sh on .*--ship"):
        world.engine.admission.check(JobRequest(name="job", run=("./gone.sh",), workdir=str(tmp_path)))


@pytest.mark.parametrize("command", ["no-such-command", "/no/such/venv/bin/python", "{workdir}/bin/python"])
def test_sending_the_folder_is_no_remedy_for_a_command_that_is_not_in_it(world, tmp_path, command):
    (tmp_path / "train.py").touch()
    run = (command.format(workdir=tmp_path), "train.py")
    with pytest.raises(InvalidInput, match="there is no command") as refused:
        world.engine.admission.check(JobRequest(name="job", run=run, workdir=str(tmp_path)))
    assert type(refused.value) is InvalidInput
    assert "--ship" not in str(refused.value)


def test_sending_is_no_remedy_where_nodes_do_not_see_the_home(world, tmp_path):
    world.backend.refuses = lambda folders: "not the same" if str(tmp_path) in folders else ""
    with pytest.raises(InvalidInput, match="does not exist") as refused:
        world.engine.admission.check(request(tmp_path / "gone"))
    assert type(refused.value) is InvalidInput


def test_the_folders_are_the_jobs_own_and_that_of_its_checkpoints(tmp_path):
    assert folders_of(request("/data"), tmp_path) == ("/data", str(tmp_path / "checkpoints"))
    own = CheckpointRequest(dir="kept")
    assert folders_of(request("/data", checkpoint=own), tmp_path) == ("/data", "/data/kept")


def test_warnings_are_in_the_status(world):
    assert result_of(world.engine.status()).warnings == ()
    world.backend.warnings = lambda: ("node 'b' does not answer",)
    assert result_of(world.engine.status()).warnings == ("node 'b' does not answer",)


def test_a_grace_that_is_longer_than_the_notice_is_said(world, tmp_path):
    assert world.engine.admission.note_on(request(tmp_path, grace_seconds=3600.0)) == ""
    world.backend.notice_seconds = 180.0
    assert world.engine.admission.note_on(request(tmp_path, grace_seconds=180.0)) == ""
    assert "grace is 600 s, and nodes here are left 180 s" in world.engine.admission.note_on(
        request(tmp_path, grace_seconds=600.0)
    )


@pytest.mark.parametrize(("notice", "measured", "words"), [
    (9.0, None, "9 s of notice, and saving needs 10 s (none of its checkpoints was measured yet)"),
    (33.0, 40.0, "33 s of notice, and saving needs 63 s (its last checkpoint took 40 s)"),
    (10.0, None, ""),
    (33.0, 20.0, ""),
    (None, 4000.0, ""),
])  # fmt: skip
def test_a_notice_that_is_too_short_for_the_jobs_of_that_name_is_said(world, tmp_path, notice, measured, words):
    world.backend.taken_back_seconds = notice
    rows = [("job", 1.0, 999.0), ("job-2", 2.0, measured), ("jobs", 3.0, 999.0), ("job-x", 4.0, 999.0)]
    values = [TelemetryRow(name, at, "report", {"checkpoint_seconds": took}) for name, at, took in rows if measured]
    world.engine.telemetry.record(values)
    said = world.engine.admission.note_on(request(tmp_path))
    assert (words in said, "raise the notice" in said) == (True, bool(words))
    assert bool(said) == bool(words)


def test_slurm_says_how_long_the_notice_is(tmp_path):
    assert SlurmBackend(tmp_path, pool=tmp_path / "pool", slots=1, margin_seconds=90.0).notice_seconds == 90.0
