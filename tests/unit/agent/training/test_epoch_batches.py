"""The batches of epochs that a framework asks for: order, places, ends of epochs, and what a misuse is told."""

from types import SimpleNamespace

import pytest

from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.data.loader import Loader, LoaderOptions
from pollux.agent.data.step_shape import StepShape
from pollux.agent.training.epoch_batches import EpochBatches
from pollux.core.errors import InvalidInput, MisusedJob


class Reader:
    """Samples that are their own indices."""

    dataset, stream = "numbers", None

    def __init__(self, length):
        self.length = length

    def read(self, requests):
        for _, _, indices in requests:
            yield list(indices)

    def again(self):
        return Reader(self.length)

    def end_workers(self):
        pass


def adaptation(total=4, repeats=1, efficiency=1.0):
    return SimpleNamespace(
        shape=lambda step: StepShape(total, repeats),
        counted_efficiency=lambda total: efficiency,
        timed_next=lambda source: next(source, None),
    )


def batches(length=10, adapts=False, **loading):
    loader = Loader(Reader(length), LoaderOptions(shuffle=False, **loading), 0, 1)
    progress = TrainingProgress(loader.size)
    return EpochBatches(loader, progress, 4, adapts)


def run_oldest(made, efficiency=1.0):
    micro = made.begin_oldest()
    if micro.is_last:
        made._progress.add(micro.total, efficiency)
        made.commit()
    return micro


def run_epoch(made, decides, efficiency=1.0):
    used = []
    for batch in made.epoch(decides):
        used.append(batch)
        run_oldest(made, efficiency)
    return used


def test_in_exact_mode_an_epoch_is_a_pass():
    made = batches()
    for epoch in range(2):
        assert run_epoch(made, adaptation()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert made.epoch_is_over
        assert made._progress.epoch == epoch, "it is closed when the next one is asked for"


def test_micro_batches_are_parts_of_their_step():
    made = batches(length=8)
    parts = []
    for _ in made.epoch(adaptation(repeats=2)):
        parts.append(made.last_issued)
        run_oldest(made)
    assert [(part.step, part.index, part.samples, part.is_last) for part in parts] == [
        (0, 0, 2, False), (0, 1, 2, True), (1, 0, 2, False), (1, 1, 2, True)
    ]  # fmt: skip


def test_with_a_batch_that_may_change_an_epoch_is_progress():
    made = batches(adapts=True)
    used = [index for batch in run_epoch(made, adaptation(efficiency=0.5), efficiency=0.5) for index in batch]
    assert used == [*range(10), *range(10)], "two passes at half the efficiency"
    assert made._progress.epoch_reached


def test_what_is_issued_ahead_counts_for_the_end_of_the_epoch():
    made = batches(adapts=True)
    assert [len(batch) for batch in made.epoch(adaptation())] == [4, 4, 2]
    assert made._progress.steps == 0
    assert not made.state_dict()["ended"], "its steps are not done"
    for _ in range(3):
        run_oldest(made)
    assert made.state_dict()["ended"]


def test_what_is_issued_and_not_committed_is_issued_again():
    made = batches()
    ahead = made.epoch(adaptation())
    assert [next(ahead), next(ahead)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    run_oldest(made)
    assert next(made.epoch(adaptation())) == [4, 5, 6, 7]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_saved_place_is_gone_on_from(num_steps):
    first, second = batches(), batches()
    source = first.epoch(adaptation())
    for _ in range(num_steps):
        next(source)
        run_oldest(first)
    state = first.state_dict()
    second._progress.load_state_dict(first._progress.state_dict())
    second.load_state_dict(state["data"], state["ended"])
    rest = run_epoch(second, adaptation())
    assert [index for batch in rest for index in batch] == list(range(4 * num_steps, 10))


def test_an_epoch_is_over_where_only_samples_are_left_that_are_dropped():
    made = batches(drop_last=True)
    source = made.epoch(adaptation())
    for _ in range(2):
        next(source)
        run_oldest(made)
    assert made.epoch_is_over
    assert run_epoch(made, adaptation())[0] == [0, 1, 2, 3], "the next epoch begins a pass"


def test_a_pass_without_a_full_batch_is_refused():
    with pytest.raises(InvalidInput, match="a whole pass has no full batch"):
        list(batches(length=3, drop_last=True).epoch(adaptation()))


def test_a_batch_from_elsewhere_is_refused():
    made = batches()
    with pytest.raises(MisusedJob, match="not from Pollux's loader"):
        made.begin_oldest()
    with pytest.raises(MisusedJob, match="no batch was drawn"):
        _ = made.last_issued
