"""Which commands are of one kind, and what the bank knows for each whole command."""

import pytest

from pollux.controller import Controller, JobFinished, JobReported, JobRunning, JobSubmitted
from pollux.controller.messages.job_spec import spec_from
from pollux.controller.messages.kinds import default_kind
from pollux.testing import goodput_model
from pollux.wire.jobfile import parse_job

PLAIN = "python train.py --model resnet"


@pytest.mark.parametrize(
    "more",
    [
        "--seed 3", "--seed=4", "--random-seed -1", "seed=7", "trainer.seed=7", "--epochs 90", "--num_train_epochs=2",
        "--lr 1e-3", "--learning_rate 0.1", "--base-lr=0.1", "-lr 0.2", "--output_dir out/7", "--out x",
        "--seed 1 --epochs 4 --lr 0.1", "trainer.max_epochs=9", "--run-name a b",
    ],
)  # fmt: skip
def test_what_does_not_change_the_speed_makes_no_other_kind(more):
    expected = f"{PLAIN} b" if more.endswith(" b") else PLAIN
    assert default_kind((*PLAIN.split(), *more.split())) == expected


@pytest.mark.parametrize(
    "more", ["--batch-size 64", "--model vit", "--amp", "--seedless", "data=imagenet", "--reseeded 3", "--workers=4"]
)
def test_what_may_change_it_does(more):
    assert default_kind((*PLAIN.split(), *more.split())) == f"{PLAIN} {more}"


def test_an_option_without_a_value_takes_none_of_the_next_option():
    assert default_kind(("t.py", "--out", "--amp", "data")) == "t.py --amp data"
    assert default_kind(("seed=1", "x")) == "seed=1 x"


def request(name, *arguments, **more):
    return parse_job({"name": name, "run": ["python", "t.py", *arguments], **more}, "/w")


def test_seeds_share_what_was_measured_and_commands_keep_their_work(make_desk):
    desk = make_desk(trigger="events")
    for number, (job, epochs, progress) in enumerate((("a", "2", 100.0), ("b", "20", 1000.0))):
        at = 100.0 * number
        desk(JobSubmitted(at, spec_from(request(job, "--seed", job, "--epochs", epochs), job)))
        desk.decide(at + 1, **{job: "n0:1"})
        desk(JobRunning(at + 2, job, 1))
        desk(JobReported(at + 20, job, goodput_model(), 50.0, local_batch=64, progress=progress))
        desk(JobReported(at + 30, job, None, 0.0, local_batch=64, progress=progress))
        desk(JobFinished(at + 40, job))
    for job, arguments, total in (
        ("c", ("--seed", "b", "--epochs", "20"), 1000.0),
        ("d", ("--seed", "a", "--epochs", "2"), 100.0),
        ("e", ("--epochs", "7"), 550.0),
    ):
        desk(JobSubmitted(300, spec_from(request(job, *arguments), job)))
        view = next(view for view in desk.controller.snapshot(300).jobs if view.id == job)
        assert view.prior is not None
        assert view.prior.total == total
        again = desk.controller.snapshot(300)
        assert next(other for other in again.jobs if other.id == job).prior is view.prior
    state = desk.controller.state()
    restored = Controller.restored(state, desk.controller.settings)
    assert restored.bank.priors == desk.controller.bank.priors
    for kind in state["bank"].values():
        del kind["works"]
    old = Controller.restored(state, desk.controller.settings)
    assert old.bank.prior("python t.py", "python t.py --seed a --epochs 2").total == 550.0


def test_a_kind_that_a_user_names_is_the_jobs_kind():
    named = spec_from(request("a", "--model", "x", kind="resnet"), "a")
    assert named.kind == "resnet"
    assert spec_from(request("a"), "a").kind == ""
