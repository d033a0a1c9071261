import base64

import pytest

from pollux.service.server.app import _folders_in_use
from pollux.storage.archive import digest_of, pack
from pollux.testing.servers.service import result_of


@pytest.fixture
def archive(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    return pack(folder)


def body_for(archive, **other):
    data = base64.b64encode(archive).decode()
    return {"digest": digest_of(archive), "size": len(archive), "offset": 0, "data": data, **other}


def test_a_package_is_taken_and_its_folder_told(client, archive, world):
    answer = client.post("/v1/packages", json=body_for(archive))
    assert answer.status_code == 200, answer.text
    folder = world.engine.settings.home / "packages" / digest_of(archive)
    assert answer.json() == {"have": len(archive), "folder": str(folder)}
    assert (folder / "train.py").read_text() == "print()\n"


@pytest.mark.parametrize(
    ("other", "status"),
    [
        ({"digest": "../x"}, 422),
        ({"digest": 5}, 422),
        ({"size": True}, 422),
        ({"size": -1}, 422),
        ({"size": 10**12}, 422),
        ({"size": 0}, 422),
        ({"offset": 1.5}, 422),
        ({"data": "no base64!"}, 422),
        ({"data": None}, 422),
        ({"digest": "0" * 64}, 409),
        ({"more": 1}, 422),
    ],
)
def test_what_cannot_be_is_refused(client, archive, other, status):
    answer = client.post("/v1/packages", json=body_for(archive, **other))
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_it_needs_a_token(client, archive):
    del client.headers["Authorization"]
    assert client.post("/v1/packages", json=body_for(archive)).status_code == 401


def test_the_folder_of_a_job_counts_as_used_until_its_end(world, tmp_path):
    """Results that a long job left are there for as long after its end as those of a short one."""
    running, done = (world.submit(name, workdir=str(tmp_path)) for name in ("running", "done"))
    world.after(100.0)
    result_of(world.engine.cancel(done))
    world.after(100.0)
    ended = world.engine.views.board.get(done).record.ended_at
    (_, now), (folder, at) = _folders_in_use(world.engine)
    assert (folder, at) == (str(tmp_path), ended)
    assert now == world.clock.time, running
