"""The loss of a fit against a plain transcription of its formula, and its gradient against differences."""

import numpy as np
import pytest

from pollux.goodput.loss import FitProblem, to_coordinates, to_parameters
from pollux.goodput.throughput import PublishedThroughput, published_sync_basis

PARAMETERS = np.array([0.2, 0.05, 0.5, 0.02, 0.1, 0.01, 1.7])
NUM_NODES = np.array([1.0, 1.0, 1.0, 2.0, 2.0, 4.0])
NUM_GPUS = np.array([1.0, 2.0, 4.0, 2.0, 8.0, 9.0])
LOCAL_BATCH = np.array([4.0, 8.0, 12.0, 4.0, 6.0, 11.0])
COMPUTE = np.array([0.45, 0.55, 0.80, 0.40, 0.60, 0.70])
STEP = np.array([0.45, 0.70, 1.00, 0.90, 1.30, 1.40])
WEIGHT = np.array([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])


def problem():
    basis = published_sync_basis(NUM_NODES, NUM_GPUS)
    return FitProblem(LOCAL_BATCH, basis, COMPUTE, STEP, WEIGHT)


def plain_loss(parameters):
    model = PublishedThroughput(*parameters)
    alpha_n, beta_n, alpha_r, beta_r, gamma = parameters[2:]
    errors = (
        np.log(model.compute_seconds(LOCAL_BATCH) / COMPUTE),
        np.log(model.step_seconds(NUM_NODES, NUM_GPUS, LOCAL_BATCH) / STEP),
    )
    rmse = [np.sqrt(np.average(error**2, weights=WEIGHT)) for error in errors]
    growth = (beta_n / alpha_n) ** 2 + (beta_r / alpha_r) ** 2
    return sum(rmse) + 1e-3 * (gamma - 1) ** 2 + 1e-2 * growth


@pytest.mark.parametrize("gamma", [1.0, 1.7, 9.5])
def test_the_loss_is_the_formula(gamma):
    parameters = np.array([*PARAMETERS[:6], gamma])
    assert problem().loss(parameters) == pytest.approx(plain_loss(parameters), rel=1e-12)


@pytest.mark.parametrize("gamma", [1.001, 1.7, 9.5])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_is_the_slope_of_the_loss(gamma, scale, smoothing):
    parameters = np.array([*PARAMETERS[:2], *(scale * PARAMETERS[2:6]), gamma])
    subject = problem()
    subject.loss(parameters, smoothing)
    gradient, _ = subject.derivatives(parameters)
    coordinates = to_coordinates(parameters)
    for index in range(7):
        ahead, behind = coordinates.copy(), coordinates.copy()
        ahead[index] += 1e-6
        behind[index] -= 1e-6
        rise = subject.loss(to_parameters(ahead), smoothing) - subject.loss(to_parameters(behind), smoothing)
        assert gradient[index] == pytest.approx(rise / 2e-6, rel=1e-5, abs=1e-8)


def test_the_curvature_is_symmetric_and_never_negative():
    subject = problem()
    subject.loss(PARAMETERS)
    _, hessian = subject.derivatives(PARAMETERS)
    np.testing.assert_allclose(hessian, hessian.T)
    assert np.linalg.eigvalsh(hessian).min() > -1e-12


def test_a_weight_of_two_is_the_row_twice():
    basis = published_sync_basis(NUM_NODES, NUM_GPUS)
    twice = [0, 1, 1, 2, 3, 4, 5]
    weighted = FitProblem(LOCAL_BATCH, basis, COMPUTE, STEP, np.array([1.0, 2.0, 1.0, 1.0, 1.0, 1.0]))
    repeated = FitProblem(LOCAL_BATCH[twice], basis[:, twice], COMPUTE[twice], STEP[twice], np.ones(7))
    assert weighted.loss(PARAMETERS) == pytest.approx(repeated.loss(PARAMETERS), rel=1e-14)


def test_coordinates_go_there_and_back():
    np.testing.assert_allclose(to_parameters(to_coordinates(PARAMETERS)), PARAMETERS)
