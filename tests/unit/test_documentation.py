"""What exists is documented: policies, commands, options; what a training job reads, writes, does and refuses."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCES = DOCS.parent / "src" / "pollux"
MADE_BY_TYPER = {"--help", "--install-completion", "--show-completion"}


def sections(page: str) -> dict[str, str]:
    """Heading to text, code blocks and sub-sections included, for every heading of a page."""
    open_sections: list[tuple[int, list[str]]] = []
    found: dict[str, list[str]] = {}
    in_code = False
    for line in (DOCS / page).read_text().splitlines():
        in_code ^= line.lstrip().startswith("```")
        heading = None if in_code else re.match(r"(#+)\s+(.*)", line)
        if heading:
            level, title = len(heading.group(1)), heading.group(2).replace("`", "").strip()
            open_sections = [(outer, lines) for outer, lines in open_sections if outer < level]
            open_sections.append((level, found.setdefault(title, [])))
        for _, lines in open_sections:
            lines.append(line)
    return {title: "\n".join(lines) for title, lines in found.items()}


def commands(command: Any, words: tuple[str, ...] = ("pollux",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every visible command below and including ``command``, with the words a user types for it."""
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from commands(child, (*words, name))


def long_options(command: Any) -> list[str]:
    visible = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    flags = [flag for parameter in visible for flag in parameter.opts if flag.startswith("--")]
    return [flag for flag in flags if flag not in MADE_BY_TYPER]


def mentions(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def test_every_policy_has_a_section():
    from pollux.policies import names

    headings = list(sections("policies.md"))
    undocumented = [name for name in names() if not any(mentions(heading, name) for heading in headings)]
    assert list(names()), "no policy is registered"
    assert undocumented == [], f"no heading of docs/policies.md names them; it has {headings}"


def test_every_command_and_option_is_documented():
    import typer.main

    from pollux.cli.main import app

    documented = sections("cli.md")
    whole_page = (DOCS / "cli.md").read_text()
    missing = []
    for words, command in commands(typer.main.get_command(app)):
        own = [text for heading, text in documented.items() if tuple(heading.split()[: len(words)]) == words]
        if not own and len(words) > 1:
            missing.append(" ".join(words))
        text = own[0] if own else whole_page
        missing += [f"{' '.join(words)} {flag}" for flag in long_options(command) if not mentions(text, flag)]
    assert missing == [], "docs/cli.md: a command needs a heading that begins with it, options a mention below"


def test_every_variable_of_the_environment_is_documented():
    from pollux.wire.environment import JOB_VARIABLES

    text = sections("training.md")["Environment variables"]
    assert [name for name in JOB_VARIABLES if f"| `{name}` |" not in text] == []
    assert sorted(set(re.findall(r"POLLUX_\w+", text)) - set(JOB_VARIABLES)) == []


def test_every_rule_for_the_learning_rate_is_documented():
    from pollux.agent.adaptation import lr_rules

    text = sections("training.md")["Learning rate"]
    assert [name for name in lr_rules.names() if f"| `{name}`" not in text] == []


def test_the_schema_of_the_receipt_is_documented():
    from pollux.agent.reporting.receipt import EVENT_KINDS, Receipt

    text = sections("training.md")["Receipt"]
    entries = Receipt("any", mode="exact", initial_batch=1).to_json()
    assert [name for name in (*entries, *EVENT_KINDS) if f"`{name}`" not in text] == []


def test_every_option_of_a_training_job_is_described():
    import inspect

    import pollux

    said = pollux.init.__doc__ or ""
    assert [name for name in inspect.signature(pollux.init).parameters if f"`{name}`" not in said] == []


def test_the_rules_of_adaptation_are_those_of_the_code():
    from pollux.agent.adaptation import batch_tuner, loss_guard, noise_scale

    text = sections("training.md")["Adaptation"]
    assert f"by more than {batch_tuner.LEAST_GAIN - 1.0:.0%}".replace("%", " %") in text
    assert batch_tuner.MAX_GROWTH == 2.0
    assert f"at least {noise_scale.MIN_MEASURED} measured steps" in text
    assert f"relative width of {batch_tuner.MAX_RELATIVE_WIDTH:g} or less" in text
    assert f"one {loss_guard._HUGE_DEVIATIONS:g} deviations above" in text
    assert f"two in a row {loss_guard._DEVIATIONS:g} deviations above" in text


def is_defined(place: str) -> bool:
    """Whether `module:function` or `module:Class.method`, below pollux, is in the source; imports nothing."""
    module, _, name = place.partition(":")
    path = SOURCES.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text()).body if file.exists() else []
    for word in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == word), None)
        if found is None:
            return False
        body = found.body
    return True


def test_the_walks_through_the_code_name_what_exists():
    page = (DOCS / "design" / "0016-walks.md").read_text()
    missing = [place for place in re.findall(r"`([a-z_.]+:[\w.]+)`", page) if not is_defined(place)]
    assert missing == [], "docs/design/0016-walks.md: these were moved or renamed; write where they are now"
    # Before the packages were made: calls or functions, and modules. A simulated job was not counted then.
    before = {"A gradient step": (57, 16), "Submit to first step": (45, 27), "Report to resize": (60, 31)}
    for title, (most_places, most_modules) in {**before, "A simulated job": (25, 12)}.items():
        text = sections("design/0016-walks.md")[title]
        places = re.findall(r"^\d+\. `([a-z_.]+):[\w.]+`", text, re.MULTILINE)
        assert 20 < len(places) < most_places, title
        assert len(set(places)) <= most_modules, title


def test_the_glossary_has_each_word_once_in_its_order_and_the_project_uses_it():
    texts = [path.read_text().lower() for folder in (SOURCES, DOCS) for path in folder.rglob("*.[pm][yd]")]
    wrong = []
    for table in (sections("glossary.md")[title] for title in ("Words of the field", "Words of Pollux")):
        words = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[1:]
        assert words == sorted(dict.fromkeys(words), key=str.lower)
        bare = [re.sub(r" \(.*", "", word).lower() for word in words]
        wrong += [word for word in bare if not all(sum(part in text for text in texts) > 1 for part in word.split())]
    assert wrong == [], "nothing else than the glossary has these words"


def modules_of_walk(title: str) -> list[str]:
    return re.findall(r"^\d+\. `([a-z_.]+):", sections("design/0016-walks.md")[title], re.MULTILINE)


def docstring_of(module: str) -> str:
    return ast.get_docstring(ast.parse((SOURCES / f"{module.replace('.', '/')}.py").read_text())) or ""


def is_in_order(names: list[str], walk: list[str]) -> bool:
    rest = iter(walk)
    return all(name in rest for name in names)


def test_modules_of_a_live_resize_name_the_steps_around_them():
    walk = modules_of_walk("Report to resize")
    told = {}
    for module in dict.fromkeys(walk):
        for line in docstring_of(module).splitlines():
            if line.startswith("In a live resize: "):
                before, *after = re.findall(r"`([a-z_.]+)`", line)
                told[module] = is_in_order([before, module, *after], walk)
    assert [module for module, right in told.items() if not right] == [], "their docstrings tell another order"
    assert told.keys() >= {"backends.dispatch.changes", "backends.shim.transition", "agent.elastic.member"}


@pytest.mark.parametrize(
    ("start", "title"), [("a start", "Submit to first step"), ("a live resize", "Report to resize")]
)
def test_the_executor_lists_what_follows_a_decision_in_its_order(start, title):
    [item] = re.findall(rf"^- {start}: (.*?)[;.]$", docstring_of("service.engine.executor"), re.MULTILINE | re.DOTALL)
    named = [name for name in re.findall(r"`([a-z_.]+)`", item) if (SOURCES / f"{name.replace('.', '/')}.py").exists()]
    assert len(named) > 6
    assert is_in_order(named, modules_of_walk(title))


def training_snippets(folder: str) -> None:
    """Run in a replica: a small job, then what docs/training.md says about its ledger and its checkpoint."""
    import os

    import torch
    from torch import nn

    import pollux

    os.chdir(folder)
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = nn.Linear(4, 1)
    with pollux.init(model, torch.optim.Adam(model.parameters()), dataset, 16, checkpoint_dir="checkpoints") as job:
        for _ in job.epochs(2):
            for x, y in job.batches():
                job.backward(nn.functional.mse_loss(job.model(x), y))
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = nn.Linear(4, 1)
    page = (DOCS / "training.md").read_text().replace("step-0000002532", "step-0000000008")
    ledger, loading = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(compile(ledger, "docs/training.md", "exec"), {"job": job, "dataset": dataset})
    exec(compile(loading, "docs/training.md", "exec"), {"model": model})
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())


def test_the_code_of_the_training_reference_runs(replica_server, tmp_path):
    replica_server.run(f"{Path(__file__).resolve()}:training_snippets", 1, {"folder": str(tmp_path)})


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_page_has_a_title(page):
    assert page.read_text().startswith("# ")
