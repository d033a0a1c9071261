"""Disks that take nothing, at every place where the agent writes, with every error: what was trained counts."""

import errno
import os
import resource
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent import initialize
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.state import State
from pollux.core.errors import InvalidInput

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.ENOENT)
_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")


class FailingDisk:
    """Operations below a folder that change it; those for which `fails` says so raise its error."""

    def __init__(self):
        self.folder = ""
        self.seen = []
        self.fails = lambda number: 0
        self.busy = False

    def hear(self, event, arguments):
        if not self.folder or self.busy or not self._changes(event, arguments):
            return
        self.busy = True
        try:
            self.seen.append(f"{event} {os.path.relpath(os.fspath(arguments[0]), self.folder)}")
            number = self.fails(len(self.seen) - 1)
        finally:
            self.busy = False
        if number:
            raise OSError(number, os.strerror(number), arguments[0])

    def _changes(self, event, arguments):
        if event == "open":
            path, mode, flags = arguments
            writes = (mode and set(mode) & set("wax+")) or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            path, writes = (arguments[0] if arguments else None), event in _WRITES
        return bool(writes) and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)


DISK = FailingDisk()


@pytest.fixture(scope="module", autouse=True)
def _hooked():
    # A hook stays as long as the process; it does nothing while no folder is named.
    sys.addaudithook(DISK.hear)


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch):
    monkeypatch.setattr("pollux.agent.checkpoint.checkpointer._RETRY_SECONDS", (0.0, 0.0))
    # To draw takes longer than all the rest.
    monkeypatch.setattr("pollux.agent.reporting.receipt_plot.png", lambda receipt: b"a picture")


@contextmanager
def failing(folder, fails) -> Iterator[FailingDisk]:
    DISK.folder, DISK.seen, DISK.fails = str(folder), [], fails
    try:
        yield DISK
    finally:
        DISK.folder = ""


def train(folder, epochs=2, after_epoch=lambda number: None, **options):
    """A whole script: the weights that it ends with."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(12, 3), torch.randint(0, 2, (12,)))
    folders = {"checkpoint_dir": folder / "saved", "output_dir": folder / "out", "tensorboard_dir": folder / "board"}
    with pollux.init(model, torch.optim.SGD(model.parameters(), 0.1), data, 4, **{**folders, **options}) as job:
        for epoch in job.epochs(epochs):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
            job.log(accuracy=0.5)
            job._run.persistence.checkpoint(wait=False)
            after_epoch(epoch)
        job.write_receipt()
        job.write_receipt(folder / "elsewhere")
    assert initialize._active is None or initialize._active() is None
    return [parameter.detach().clone() for parameter in model.parameters()]


def is_complete(folder):
    """Whether all that a run writes is there."""
    names = ("out/receipt.json", "out/receipt.png", "elsewhere/receipt.json", "elsewhere/receipt.png")
    saved = [*folder.glob("saved/step-0000000006*")]
    return (
        bool(saved)
        and all((folder / name).exists() for name in names)
        and any(path.stat().st_size for path in (folder / "board").iterdir())
    )


def same(left, right):
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights of an undisturbed run, and every operation that it did."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with failing(folder, lambda number: 0) as disk:
        weights = train(folder)
    assert is_complete(folder)
    return weights, list(disk.seen)


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_each_single_write_may_fail_in_each_way(trained, tmp_path, caplog):
    """One after the other, all operations; the errors take turns, so that each meets each kind of file."""
    weights, seen = trained
    assert len(seen) > 20, seen
    kinds = {text.split("/")[0] for text in seen}
    assert {"os.mkdir saved", "os.mkdir out", "os.mkdir elsewhere"} <= kinds, kinds
    for number, what in enumerate(seen):
        error = ERRORS[number % len(ERRORS)]
        folder = tmp_path / str(number)
        folder.mkdir()
        caplog.clear()
        with failing(folder, lambda other, number=number, error=error: error * (other == number)) as disk:
            result = train(folder)
        assert same(result, weights), what
        assert os.strerror(error) in caplog.text or is_complete(folder), f"{what} failed, and nobody was told"
        assert disk.seen, what
        shutil.rmtree(folder)


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("since", [0, 8])
def test_a_disk_that_takes_nothing_from_some_moment_on(trained, tmp_path, error, since, caplog):
    """From the start, where there is nothing yet, and in the middle; said once for each record, not for each write."""
    folder = tmp_path / "job"
    folder.mkdir()
    if since == 0 and error in (errno.EACCES, errno.ENOENT):
        # Nothing was ever kept where nobody may make a folder: that is a mistake, and said as one.
        with failing(folder, lambda number: error), pytest.raises(InvalidInput, match="give another"):
            train(folder)
        return
    with failing(folder, lambda number: error * (number >= since)):
        assert same(train(folder), trained[0])
    lines = [record.getMessage() for record in caplog.records if "goes on without it" in record.getMessage()]
    assert len(lines) == len(set(lines)) <= 4, lines


def test_a_start_on_a_full_disk_goes_on_from_what_was_saved(trained, tmp_path):
    train(tmp_path, epochs=1)
    seen: list[int] = []
    with failing(tmp_path, lambda number: errno.ENOSPC):
        result = train(tmp_path, epochs=2, after_epoch=seen.append)
    assert seen == [1], "the first epoch was not trained again"
    assert same(result, trained[0])


def test_folders_that_are_removed_under_way_are_made_again(tmp_path, trained):
    def remove(epoch):
        for name in ("saved", "out", "board"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)

    assert same(train(tmp_path, after_epoch=remove), trained[0])
    assert (tmp_path / "out" / "receipt.json").exists()
    checkpointer = Checkpointer(tmp_path / "saved")
    newest = checkpointer.latest()
    checkpointer.close()
    assert newest is not None
    assert newest.manifest.step == 6


def test_a_failed_checkpoint_is_told_and_the_good_one_stays(tmp_path, caplog):
    told = []

    def fill(epoch):
        job = initialize._active()
        job._parts.checkpointer.wait()
        told.append(job._run.record.reports.checkpoint_error)
        DISK.fails = lambda number: errno.ENOSPC * (epoch == 0)

    with failing(tmp_path, lambda number: 0):
        train(tmp_path, epochs=3, after_epoch=fill)
    assert told[0] == told[2] == ""
    assert "No space left on device" in told[1]
    assert "the checkpoint of step 6 was not written" in caplog.text
    text = (tmp_path / "out" / "receipt.json").read_text()
    assert '"not-saved"' in text


def test_a_finished_training_counts_where_its_last_checkpoint_cannot_be_written(tmp_path, caplog):
    def fill(epoch):
        initialize._active()._parts.checkpointer.wait()
        DISK.fails = lambda number: errno.ENOSPC * (epoch == 1)

    with failing(tmp_path, lambda number: 0):
        train(tmp_path, epochs=2, after_epoch=fill)
    assert "finished, but the last checkpoint could not be saved" in caplog.text


def test_a_checkpoint_that_somebody_waits_for_is_tried_again(tmp_path):
    checkpointer = Checkpointer(tmp_path / "saved")
    failures = iter([errno.ENOSPC, errno.EIO])
    with failing(tmp_path, lambda number: next(failures, 0)):
        checkpointer.save(1, State({"model.w": torch.ones(2)}, {}, {}), {}, wait=True)
    assert checkpointer.last_error is None
    assert checkpointer.last_saved is not None
    checkpointer.close()


def test_a_script_whose_files_may_not_grow_ends_well(tmp_path):
    """The kernel refuses here, inside of whatever library writes: every file, from a moment on."""
    for since in ("start", "epoch", "end"):
        folder = tmp_path / since
        folder.mkdir()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                warnings.simplefilter("ignore")
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)

                def limit(*_):
                    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

                if since == "start":
                    limit()
                train(folder, after_epoch=lambda epoch, at=since: limit() if (at, epoch) in STOPS else None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, since


STOPS = (("epoch", 0), ("end", 1))
