"""What a backend may refuse at a submission, and say of its state, where it does such things."""

import pytest

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
