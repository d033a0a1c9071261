"""A real S3 server on the loopback interface, for tests of checkpoints in a store; needs moto and flask."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from pollux.testing.waiting import PATIENCE_SECONDS

__all__ = ["make_bucket", "s3_server"]

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The variables by which every client finds it, while it runs."""
    # A session of its own, and the end of its input ends it, so that it cannot outlive whoever started it.
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.communicate(timeout=PATIENCE_SECONDS)
        server.stdout.close()


def make_bucket(name: str) -> None:
    """A new one on the server that this process's variables lead to."""
    import fsspec

    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
