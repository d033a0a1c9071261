"""Both models on the measurements published with the paper: how well they fit, and are fitted."""

import csv

import numpy as np
import pytest

from pollux.goodput import Observation, fit, fit_fabric

APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")


def read(folder, application, file):
    rows = []
    with (folder / "profiles" / application / file).open(newline="") as lines:
        for row in csv.DictReader(lines):
            if "placement" in row:
                num_nodes, num_gpus = len(row["placement"]), sum(map(int, row["placement"]))
            else:
                num_nodes, num_gpus = int(row["num_nodes"]), int(row["num_replicas"])
            step, sync = float(row["step_time"]), float(row["sync_time"])
            rows.append(Observation(num_nodes, num_gpus, float(row["local_bsz"]), step - sync, step))
    return rows


def rmsle(model, rows):
    nodes, gpus, local_batch, step = np.array(
        [(row.num_nodes, row.num_gpus, row.local_batch, row.step_seconds) for row in rows]
    ).T
    return float(np.sqrt(np.mean(np.log(model.step_seconds(nodes, gpus, local_batch) / step) ** 2)))


@pytest.mark.parametrize("application", APPLICATIONS)
def test_placements_are_fitted_to_a_tenth(osdi21_data, application):
    rows = read(osdi21_data, application, "placements.csv")
    assert rmsle(fit(rows).parameters, rows) <= 0.13
    assert rmsle(fit_fabric(rows).parameters, rows) <= 0.12


@pytest.mark.parametrize("application", APPLICATIONS)
def test_all_rows_are_fitted_as_well_as_the_loss_allows(osdi21_data, lbfgs_loss, application):
    rows = read(osdi21_data, application, "placements.csv") + read(osdi21_data, application, "scalability.csv")
    result = fit(rows)
    assert result.loss <= lbfgs_loss(rows) * (1 + 1e-4)
    assert rmsle(result.parameters, rows) <= 0.132


@pytest.mark.parametrize("application", APPLICATIONS)
def test_random_subsets_are_fitted_as_well_as_lbfgs_does(osdi21_data, lbfgs_loss, application):
    table = read(osdi21_data, application, "placements.csv")
    generator = np.random.default_rng(7)
    for count in (1, 3, 8, 20):
        rows = [table[index] for index in generator.choice(len(table), count)]
        # 1e-4 in log seconds is for fits that can be perfect, where a relative difference says nothing.
        assert fit(rows).loss <= lbfgs_loss(rows) * (1 + 1e-3) + 1e-4
