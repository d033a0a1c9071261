"""A framework of plain numpy: it takes its own steps and keeps its own arrays, and everything else is Pollux's.

Run as a program it trains a linear model in a process in which PyTorch cannot be imported, and prints what happened.
"""

import sys

if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # any import of it now fails

import argparse
import datetime
import io
import json
import secrets
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import Adaptation, BatchRange, RoundReport
from pollux.agent.adaptation.measurements import StepTime
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.checkpoint.folder import CheckpointFolder
from pollux.agent.checkpoint.manifest import FORMAT, Manifest, decode, digest_file, require_same_signature
from pollux.agent.data.ledger import SampleLedger
from pollux.agent.data.loader import Loader, LoaderOptions
from pollux.agent.data.order import mix_seed
from pollux.agent.distributed.environment import Environment
from pollux.agent.reporting.receipt import Receipt
from pollux.agent.reporting.report_client import Reporter
from pollux.agent.reporting.reporter import ReportBuilder
from pollux.agent.reporting.status import TrainingStatus, merge_ledger
from pollux.agent.training.epoch_batches import EpochBatches
from pollux.agent.training.rounds import AdaptationRounds
from pollux.testing.waiting import PATIENCE_SECONDS

SAMPLES, FEATURES, SEED, RATE, MOMENTUM = 500, 6, 3, 0.0005, 0.5
SIGNATURE = {"model": f"linear {FEATURES}"}


def data():
    random = np.random.default_rng(1)
    x = random.standard_normal((SAMPLES, FEATURES))
    y = x @ np.arange(1.0, FEATURES + 1.0) + 8.0 * random.standard_normal(SAMPLES)
    return x, y


def permutation(size, seed, pass_index):
    return np.random.default_rng(mix_seed(seed, pass_index)).permutation(size)


def loss_and_gradient(weights, x, y):
    wrong = x @ weights - y
    return float(wrong @ wrong) / len(y), 2.0 * (x.T @ wrong) / len(y)


class ArrayReader:
    """Rows of arrays, by the framework's own permutation."""

    stream = None

    def __init__(self, x, y):
        self.dataset = x, y
        self.length = len(x)

    def permutation(self, size, seed, pass_index):
        return permutation(size, seed, pass_index)

    def read(self, requests):
        x, y = self.dataset
        for _, _, indices in requests:
            yield x[indices], y[indices], indices

    def again(self):
        return ArrayReader(*self.dataset)

    def end_workers(self):
        pass


class MomentumDescent:
    def __init__(self, weights):
        self.weights = weights
        self.velocity = np.zeros_like(weights)
        self.param_groups = [{"lr": RATE, "momentum": MOMENTUM}]
        self.defaults = {"lr": RATE, "momentum": MOMENTUM}
        self.state: dict[int, object] = {}

    def step(self, gradient):
        (group,) = self.param_groups
        self.velocity = group["momentum"] * self.velocity + gradient
        self.weights -= group["lr"] * self.velocity


class Meter:
    """Squared lengths of the parts of measured steps, and of the whole."""

    num_groups, kind, is_warm = 1, "plain", True

    def __init__(self):
        self.rows = []

    def collect(self):
        rows, self.rows = np.array(self.rows, dtype=float).reshape(-1, 4), []
        return SimpleNamespace(parts=rows[:, :1], whole=rows[:, 1:2], counts=rows[:, 2], totals=rows[:, 3])


class MadeUpTimer:
    """Steps that cost nearly the same at any batch, so that larger ones pay; no clock is read."""

    includes_data_wait = False

    def __init__(self):
        self.done = []

    def begin_step(self, told_apart):
        self.told_apart = told_apart

    def add_data_wait(self, seconds):
        pass

    def end_step(self, repeats, local_batch, measured):
        compute = 0.02 + 1e-5 * local_batch
        told = compute if self.told_apart else None
        self.done.append(StepTime(0.01 + repeats * compute, 0.0, told, repeats, local_batch, measured))

    def drain(self):
        done, self.done = self.done, []
        return done


class Alone:
    """One replica."""

    num_replicas = num_nodes = 1

    def gather(self, numbers):
        return np.array([numbers])

    def sum_integers(self, values):
        return list(values)


class NumpyTraining:
    """Where steps are taken, and whose rounds they are."""

    def __init__(self, folder, batch, max_batch=None, local_max=None):
        self.optimizer = MomentumDescent(np.zeros(FEATURES))
        self.clock = MadeUpTimer()
        allowed = BatchRange(batch, max_batch, local_max)
        self.meter = None if allowed.is_exact else Meter()
        rule = lr_rules.create(lr_rules.default_rule(self.optimizer))
        loader = Loader(ArrayReader(*data()), LoaderOptions(seed=SEED), 0, 1)
        self.replicas = Alone()
        self.progress = TrainingProgress(loader.size)
        self.batches = EpochBatches(loader, self.progress, batch, not allowed.is_exact)
        self.adaptation = Adaptation(allowed, rule, self, self.replicas, "cpu", float(SAMPLES), not allowed.is_exact)
        mode = "exact" if allowed.is_exact else "adaptive"
        self.receipt = Receipt(
            "numpy", mode=mode, initial_batch=batch, max_batch=max_batch, rule=rule.name, dataset_size=SAMPLES
        )
        self.status = TrainingStatus(self.adaptation, self.progress, self.replicas, self.receipt)
        self.rounds = AdaptationRounds(self.adaptation, self.progress, self)
        self.reported: list[dict[str, object]] = []
        self.reports = ReportBuilder(self.status, Environment(), "cpu", Reporter(self._post))
        self.folder = CheckpointFolder(folder)
        self.used: list[list[int]] = []
        self._loss = (0.0, 0)

    def _post(self, body):
        self.reported.append(json.loads(body))
        return {}

    # Where steps are taken

    def losses(self):
        loss, self._loss = self._loss, (0.0, 0)
        return loss

    def predicted_local_batch(self, local_batch):
        return None

    def train(self, epochs, last_step=None):
        while self.progress.epoch + self.batches.epoch_is_over < epochs:
            for x, y, indices in self.batches.epoch(self.adaptation):
                if self._run(x, y, indices) and self.progress.steps == last_step:
                    return
            if self.batches.loader.pass_done:
                merge_ledger(self.batches.loader, self.replicas)
                ledger = self.batches.loader.ledger
                self.receipt.close_pass(self.batches.loader.pass_index, ledger.count, f"{ledger.digest:#018x}")

    def _run(self, x, y, indices):
        micro = self.batches.begin_oldest()
        if micro.index == 0:
            self.factors = self.adaptation.begin_step(micro, self.progress.epochs)
            self.whole, self.parts, self.samples = np.zeros(FEATURES), [], []
        loss, gradient = loss_and_gradient(self.optimizer.weights, x, y)
        share = micro.samples / micro.total
        self._loss = self._loss[0] + share * loss, self._loss[1] + micro.is_last
        self.whole += share * gradient
        self.parts.append(share * float(gradient @ gradient))
        self.samples += indices
        if micro.is_last:
            self._step(micro)
        return micro.is_last

    def _step(self, micro):
        if self.meter is not None and micro.measured:
            self.meter.rows.append([sum(self.parts), self.whole @ self.whole, len(self.parts), micro.total])
        with lr_rules.scaled_rates(self.optimizer.param_groups, self.factors):
            self.optimizer.step(self.whole)
        self.progress.add(micro.total, self.adaptation.end_step(micro))
        self.batches.commit()
        self.used.append(self.samples)
        self.reports.note_step()
        self.rounds.run_due()

    # Whose rounds they are

    def round_measured(self, report):
        # So that each round finds what the one before asked for, and the run is the same each time.
        assert self.adaptation.fit.wait(PATIENCE_SECONDS)
        self.report = report

    def round_accepted(self, report, is_watched):
        seconds = float(self.progress.steps)
        self.receipt.sample(self.status.receipt_row(self.optimizer.param_groups, seconds, report))
        self.reports.round(report)

    def capture(self):
        return self.state()

    def batch_changed(self, change, before, total):
        text = f"batch {total} to {self.adaptation.total}: {change.reason}"
        self.receipt.event("batch-changed", self.progress.steps, self.progress.progress, text)

    def restore(self, captured):
        self.take_state(captured)
        return captured["adaptation"]

    def rolled_back(self, why, total, bad):
        self.receipt.event("rolled-back", self.progress.steps, self.progress.progress, why)

    # Its state

    def state(self):
        merge_ledger(self.batches.loader, self.replicas)
        return {
            "weights": self.optimizer.weights.tolist(),
            "velocity": self.optimizer.velocity.tolist(),
            "progress": self.progress.state_dict(),
            "batches": self.batches.state_dict(),
            "adaptation": self.adaptation.state_dict(),
            "receipt": self.receipt.state_dict(),
        }

    def take_state(self, state):
        self.optimizer.weights = np.array(state["weights"])
        self.optimizer.velocity = np.array(state["velocity"])
        self.progress.load_state_dict(state["progress"])
        self.batches.load_state_dict(state["batches"]["data"], state["batches"]["ended"])

    def save(self):
        name, _ = self.folder.begin(self.progress.steps)
        beside = self.folder.path / name
        state = self.state()
        arrays = {name: np.array(state.pop(name)) for name in ("weights", "velocity")}
        content = io.BytesIO()
        np.savez(content, **arrays)
        (beside / "arrays.npz").write_bytes(content.getvalue())
        created = datetime.datetime.now(datetime.UTC).isoformat()
        files = {"arrays.npz": digest_file(beside / "arrays.npz")}
        manifest = Manifest(FORMAT, "test", "", created, self.progress.steps, 1, state, SIGNATURE, {}, files)
        return self.folder.publish(beside, manifest)

    def resume(self):
        found = self.folder.newest_whole()
        if found is None:
            return
        manifest = decode(found[1].encode())
        require_same_signature(manifest.signature, SIGNATURE)
        with np.load(self.folder.path / found[0] / "arrays.npz") as arrays:
            state = {**manifest.values, **arrays}
        self.take_state(state)
        self.adaptation.load_state_dict(state["adaptation"], self.progress.steps)
        self.receipt.load_state_dict(state["receipt"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--max-batch", type=int)
    parser.add_argument("--local-max", type=int)
    parser.add_argument("--last-step", type=int)
    given = parser.parse_args()
    training = NumpyTraining(given.folder / "checkpoints", given.batch, given.max_batch, given.local_max)
    training.resume()
    training.train(given.epochs, given.last_step)
    training.save()
    training.reports.close(RoundReport(None, None), final=given.last_step is None)
    training.adaptation.close()
    training.folder.release()
    loader = training.batches.loader
    places = np.concatenate([permutation(SAMPLES, SEED, loader.pass_index)[: loader.cursor], np.array([], dtype=int)])
    print(
        json.dumps(
            {
                "weights": training.optimizer.weights.tolist(),
                "used": training.used,
                "ledger_is_right": loader.ledger == SampleLedger.of(places.astype(np.int64)),
                "batch": training.adaptation.total,
                "progress": training.progress.progress,
                "profile_keys": len(training.adaptation.profile.keys),
                "noise_measured": training.status.noise.num_measured,
                "efficiency": training.status.efficiency,
                "lr_factor": training.status.lr_factors[0],
                "guard_watched": [event.kind for event in training.receipt.events].count("batch-changed"),
                "rows": len(training.receipt.rows),
                "receipt": training.receipt.to_json(),
                "reported": training.reported[-1],
                "written": [path.name for path in training.receipt.write(given.folder / secrets.token_hex(4))],
                "torch": "torch" in {name.split(".")[0] for name, module in sys.modules.items() if module is not None},
            }
        )
    )


if __name__ == "__main__":
    main()
