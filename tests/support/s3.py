"""A real S3 server on the loopback interface, for tests of checkpoints in a store; needs moto and flask."""

from __future__ import annotations

import contextlib
import os
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
    """Run the server; yields the environment variables by which S3 clients find it."""
    # In a session of its own. It ends with its standard input, so that it cannot outlive the process that started it.
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
            # What a user has set there counts for more than some of these.
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.communicate(timeout=PATIENCE_SECONDS)
        server.stdout.close()


def make_bucket(name: str) -> None:
    """Make a bucket on the server that the environment variables of this process name."""
    import fsspec

    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
