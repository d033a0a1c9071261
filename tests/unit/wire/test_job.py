import pytest

from pollux.wire.job import JobRequest


@pytest.mark.parametrize(
    ("gpus", "on_resize", "rigid", "live"),
    [
        ((1, 4), None, False, True),
        ((1, 4), "live", False, True),
        ((1, 4), "restart", False, False),
        ((2, 2), None, True, False),
        ((2, 2), "never", True, False),
        ((2, 2), "live", False, True),
        ((2, 2), "restart", False, False),
    ],
)
def test_elastic_jobs_change_while_they_run_unless_they_say_otherwise(gpus, on_resize, rigid, live):
    request = JobRequest("job", ("true",), *gpus, on_resize=on_resize)
    assert (request.is_rigid, request.allows_live) == (rigid, live)
