"""What `pollux.init` refuses by itself; through `init`, with nothing changed by it, in `test_start`."""

import inspect

import pytest
import torch
from torch import nn

import pollux.agent
from pollux.agent.job import option_checks
from pollux.core.errors import InvalidInput, UnknownName

PARAMETERS = inspect.signature(pollux.agent.init).parameters
UNCHECKED = {"model", "optimizer", "dataset", "device", "lr_scheduler"}


def given(**changed: object) -> dict[str, object]:
    values = {name: parameter.default for name, parameter in PARAMETERS.items()}
    return {**values, "batch_size": 8, **changed}


def test_every_option_has_a_kind_or_a_check_of_its_own():
    assert set(option_checks._KINDS) == set(PARAMETERS) - UNCHECKED
    option_checks.check_kinds(given(), PARAMETERS)


def test_none_stands_for_a_default_only_where_that_is_none():
    option_checks.check_kinds(given(clip_norm=None), PARAMETERS)
    with pytest.raises(InvalidInput, match="shuffle is 1: give True or False"):
        option_checks.check_kinds(given(shuffle=1), PARAMETERS)
    with pytest.raises(InvalidInput, match="move_batches is None"):
        option_checks.check_kinds(given(move_batches=None), PARAMETERS)


def test_batches_that_contradict_each_other_are_refused():
    allowed = option_checks.batch_range(8, 64, 4, 1)
    assert (allowed.initial, allowed.maximum, allowed.local_max, allowed.accumulation) == (8, 64, 4, 1)
    with pytest.raises(InvalidInput, match="batch_size is 8, above max_batch_size 4"):
        option_checks.batch_range(8, 4, None, 0)
    with pytest.raises(InvalidInput, match="accumulation is 8 with a batch of 8"):
        option_checks.batch_range(8, None, None, 8)


def test_an_unknown_option_of_the_wrapper_is_refused_by_name():
    option_checks.check_wrapper_options({"find_unused_parameters": True})
    with pytest.raises(UnknownName, match="find_unused"):
        option_checks.check_wrapper_options({"find_unused": True})


def test_an_optimiser_must_have_the_models_parameters_and_no_others():
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    option_checks.check_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidInput, match="none of the model's parameters"):
        option_checks.check_model(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(InvalidInput, match="2 of the optimizer's 4 parameters"):
        option_checks.check_model(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
