"""The state is the fold of the log: a snapshot from a store and the rest of its log give what the whole log gives."""

from contextlib import closing

import pytest

from pollux.controller import (
    Controller,
    ControllerSettings,
    Event,
    JobPaused,
    JobResumed,
    JobSpec,
    JobSubmitted,
    NodeAdded,
)
from pollux.core import Cluster, JobLimits, Node
from pollux.policies import create
from pollux.store import SavedState, open_store
from pollux.testing import FakeDriver, FakeWork, goodput_model

SETTINGS = ControllerSettings("events")


def story() -> list[Event]:
    events: list[Event] = [NodeAdded(0.0, Node(f"n{index}", 4)) for index in range(2)]
    events += [JobSubmitted(20.0 * index, JobSpec(f"j{index}", JobLimits(max_gpus=4))) for index in range(5)]
    events += [JobPaused(130.0, "j1"), JobResumed(190.0, "j1")]
    work = {f"j{index}": FakeWork(300.0 + 50.0 * index, goodput=goodput_model()) for index in range(5)}
    return FakeDriver(Controller(Cluster(()), SETTINGS), create("pollux"), events, work).run().events


@pytest.mark.parametrize("in_file", [False, True])
def test_a_snapshot_and_the_rest_give_the_whole(tmp_path, in_file):
    events = story()
    path = tmp_path / "store.sqlite" if in_file else None
    controller = Controller(Cluster(()), SETTINGS)
    with closing(open_store(path)) as store:
        for revision, event in enumerate(events, start=1):
            controller.apply(event)
            assert store.append([event]) == revision
            if revision % 7 == 0:
                store.save(SavedState(revision, controller.state()))
                store.trim(event.at - 50.0)
            saved = store.load()
            again = Controller(Cluster(()), SETTINGS)
            if saved is not None:
                again = Controller.restored(saved.state, SETTINGS)
            for _, fact in store.read(again.revision):
                again.apply(fact)
            assert again.state() == controller.state()
        assert store.revision == len(events) > 30
        assert next(store.read())[0] > 1, "some of the log was trimmed"
