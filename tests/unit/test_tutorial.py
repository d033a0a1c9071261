"""docs/tutorial-policy.md: its policy is short, its code runs, and its policy passes the suite it tells to inherit."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pollux.testing import conformance

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial-policy.md").read_text()
POLICY, CONFORMANCE, SIMULATION = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PRINTED = re.search(r"^```\n(shortest .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
MODULE = "pollux.policies.shortest"


def run(source: str, name: str) -> ModuleType:
    """A module made of a block of the page."""
    module = ModuleType(name)
    exec(compile(source, "docs/tutorial-policy.md", "exec"), module.__dict__)
    return module


def run_beside_the_policy(source: str) -> ModuleType:
    """The same while the policy can be imported by the name that the page gives it."""
    assert MODULE not in sys.modules, "the tutorial's policy exists; choose another name for it"
    sys.modules[MODULE] = POLICY_MODULE
    try:
        return run(source, "tutorial")
    finally:
        del sys.modules[MODULE]


POLICY_MODULE = run(POLICY, MODULE)


class TestTutorialPolicy(run_beside_the_policy(CONFORMANCE).TestShortest):  # type: ignore[misc]
    """The class printed on the page, with all that it inherits."""


def test_the_class_on_the_page_inherits_the_suite():
    assert issubclass(TestTutorialPolicy, conformance.PolicyConformance)


def test_the_policy_has_fewer_than_40_lines():
    assert len(POLICY.splitlines()) < 40


def test_the_registry_line_names_the_class():
    line = re.search(r'^    "(.*)": "(.*):(.*)",$', PAGE, re.MULTILINE)
    assert line is not None
    name, module, attribute = line.groups()
    assert module == MODULE
    assert getattr(POLICY_MODULE, attribute).name == name


@pytest.mark.slow
def test_the_simulation_prints_what_the_page_says(capsys):
    run_beside_the_policy(SIMULATION)
    assert PRINTED is not None
    assert capsys.readouterr().out == PRINTED.group(1)
