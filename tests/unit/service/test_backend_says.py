"""What a backend may refuse at a submission, and say of its state, where it does such things."""

import pytest

from pollux.backends.slurm import SlurmBackend
from pollux.core.errors import InvalidInput
from pollux.service.launching import folders_of
from pollux.wire.job import CheckpointRequest, JobRequest


def request(home, **more):
    return JobRequest(name="job", run=("true",), workdir=str(home), **more)


def test_a_job_whose_folder_is_not_on_the_nodes_is_refused(world, tmp_path):
    asked = []

    def refuses(folders):
        asked.append(folders)
        return "folder '/x' is not the same on node 'b' as here"

    world.engine.check(request(tmp_path))
    world.backend.refuses = refuses
    with pytest.raises(InvalidInput, match="not the same on node 'b'"):
        world.engine.check(request(tmp_path))
    assert asked == [folders_of(request(tmp_path), tmp_path)]
    world.backend.refuses = lambda folders: ""
    world.engine.check(request(tmp_path))


def test_the_folders_are_the_jobs_own_and_that_of_its_checkpoints(tmp_path):
    assert folders_of(request("/data"), tmp_path) == ("/data", str(tmp_path / "checkpoints"))
    own = CheckpointRequest(dir="kept")
    assert folders_of(request("/data", checkpoint=own), tmp_path) == ("/data", "/data/kept")


def test_warnings_are_in_the_status(world):
    assert world.engine.status().warnings == ()
    world.backend.warnings = lambda: ("node 'b' does not answer",)
    assert world.engine.status().warnings == ("node 'b' does not answer",)


def test_a_grace_that_is_longer_than_the_notice_is_said(world, tmp_path):
    assert world.engine.note_on(request(tmp_path, grace_seconds=3600.0)) == ""
    world.backend.notice_seconds = 180.0
    assert world.engine.note_on(request(tmp_path, grace_seconds=180.0)) == ""
    assert "grace is 600 s, and nodes here are left 180 s" in world.engine.note_on(
        request(tmp_path, grace_seconds=600.0)
    )


def test_slurm_says_how_long_the_notice_is(tmp_path):
    assert SlurmBackend(tmp_path, pool=tmp_path / "pool", slots=1, margin_seconds=90.0).notice_seconds == 90.0
