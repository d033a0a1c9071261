"""A laptop: a client whose folder is in a mount namespace of its own, and a service that cannot see it."""

import os
import subprocess
import sys

from tests.integration.ray.conftest import wait
from tests.integration.ray.test_service import Service

from pollux.testing.waiting import PATIENCE_SECONDS

# Prints a file that lies beside it, and where it lies itself.
SCRIPT = "import pathlib, sys\nprint('ran', pathlib.Path(sys.argv[1]).read_text(), pathlib.Path(__file__).resolve())\n"
# The folder is on a file system that nobody else has mounted.
LAPTOP = """
mount -t tmpfs none "$1" && mkdir "$1/work" && cd "$1/work" || exit 99
printf %s "$SCRIPT" > train.py && printf %s "$WORD" > data.txt && mkdir .git && touch .git/left-out || exit 99
shift
exec "$@"
"""


class Laptop:
    """`pollux` with a folder that only it sees, and the address and token of a service."""

    def __init__(self, folder, service, word):
        self.mount, self.home = folder / "laptop", folder / "laptop-home"
        self.mount.mkdir()
        told = {"POLLUX_SERVER": service.url, "POLLUX_TOKEN": service.token, "POLLUX_HOME": str(self.home)}
        self.environ = {**os.environ, **told, "SCRIPT": SCRIPT, "WORD": word}

    def __call__(self, *arguments):
        words = ["unshare", "--mount", "sh", "-c", LAPTOP, "sh", str(self.mount), sys.executable, "-m", "pollux"]
        return subprocess.run(
            [*words, *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )


def test_a_folder_that_only_the_client_sees_is_sent_and_its_job_runs_there(cluster, tmp_path):
    service = Service(tmp_path / "home", cluster)
    try:
        wait("nodes", lambda: sorted(service.nodes().values()) == [4, 4, 4])
        laptop = Laptop(tmp_path, service, "of the laptop")
        job = ["--gpus", "5", "--name", "sent", "--", "python", "train.py", "data.txt"]
        refused = laptop("submit", "--no-ship", *job)
        assert refused.returncode == 2, refused
        assert f"workdir {laptop.mount}/work does not exist" in refused.stderr
        assert "--ship" in refused.stderr
        assert not service.jobs()

        planned = laptop("submit", "--dry-run", *job)
        assert planned.stdout.startswith(f"sent: would send {laptop.mount}/work ("), planned
        assert not (service.home / "packages").exists() or not [*(service.home / "packages").iterdir()]

        done = laptop("submit", "--wait", *job)
        assert done.returncode == 0, done
        (folder,) = (service.home / "packages").iterdir()
        said = done.stdout.splitlines()[0]
        assert said.startswith(f"sent: {laptop.mount}/work does not exist where jobs run: sent (")
        assert said.endswith(f" KiB packed) to {service.url}, as {folder}")
        assert not [*laptop.mount.iterdir()], "the service sees the folder: this test shows nothing"
        assert [path.name for path in sorted(folder.iterdir())] == ["data.txt", "train.py"]
        assert service.jobs()["sent"]["state"] == "succeeded"
        for replica in range(5):
            log = service.call(f"/v1/jobs/sent/logs?replica={replica}")
            assert f"ran of the laptop {folder}/train.py" in log["text"]
    finally:
        service.pollux("down")
