import pytest

from pollux.agent.checkpoint.checkpointer import Checkpointer


@pytest.fixture
def writer(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    yield checkpointer
    checkpointer.close()
