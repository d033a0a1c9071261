"""What the house rules say about every module: docstring, exports, size, names, third-party imports.

Which room may import which is checked by import-linter, and the order inside ``__all__`` by ruff, both in
``make check``.
"""

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src"
MODULES = sorted((SOURCE / "pollux").rglob("*.py"))
MAX_LINES = 600


@dataclass(frozen=True)
class ThirdParty:
    """Packages a room may import: anywhere, or only where the import runs on use (or never, for types)."""

    anywhere: frozenset[str] = frozenset()
    on_use: frozenset[str] = frozenset()


def third_party(anywhere: str = "", on_use: str = "") -> ThirdParty:
    return ThirdParty(frozenset(anywhere.split()), frozenset(on_use.split()))


ROOMS = {
    "": third_party(),
    "core": third_party(),
    "goodput": third_party("numpy", on_use="scipy"),
    "policies": third_party("numpy", on_use="scipy"),
    "controller": third_party(),
    "storage": third_party(on_use="fsspec"),
    "wire": third_party(on_use="ruamel"),
    "store": third_party(),
    "backends": third_party(on_use="pynvml torch"),
    "service": third_party("pydantic starlette uvicorn", on_use="numpy"),
    "agent": third_party("numpy torch", on_use="lightning matplotlib scipy transformers"),
    "sim": third_party("numpy scipy", on_use="matplotlib"),
    "testing": third_party("hypothesis numpy pytest", on_use="fsspec torch"),
    "cli": third_party("rich typer", on_use="matplotlib numpy uvicorn"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    """The sub-package a file belongs to; empty for ``pollux/__init__.py`` and ``pollux/__main__.py``."""
    inside = path.relative_to(SOURCE / "pollux").parts
    return inside[0] if len(inside) > 1 else ""


def is_public(path: Path) -> bool:
    return not any(part.startswith("_") for part in module_name(path).split("."))


def in_each(paths: list[Path], wrong: Callable[[Path], object]) -> dict[str, object]:
    """What is wrong, by file. One test for all files: a test for each would take pytest longer than the check."""
    found = {str(path.relative_to(SOURCE)): wrong(path) for path in paths}
    return {name: told for name, told in found.items() if told}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imported_packages(node: ast.AST, on_use: bool = False) -> Iterator[tuple[str, bool, int]]:
    """Every top-level package imported below ``node``: its name, whether only on use, and the line."""
    on_use = on_use or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name.partition(".")[0], on_use, node.lineno
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
        yield node.module.partition(".")[0], on_use, node.lineno
    for child in ast.iter_child_nodes(node):
        yield from imported_packages(child, on_use)


def defined_names(tree: ast.Module) -> set[str]:
    """The public classes, functions and type aliases a module defines at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("TypeAlias"):
            names.add(ast.unparse(node.target))
    return {name for name in names if not name.startswith("_")}


def test_a_module_says_what_lives_in_it():
    assert in_each(MODULES, lambda path: not ast.get_docstring(tree_of(path))) == {}


def wrong_exports(path: Path) -> list[str]:
    module = importlib.import_module(module_name(path))
    # A package that is nothing but its docstring exports nothing.
    empty = path.name == "__init__.py" and len(tree_of(path).body) == 1
    exported = getattr(module, "__all__", [] if empty else None)
    if exported is None:
        return ["there is no __all__"]
    twice = [f"{name} is exported twice" for name, count in Counter(exported).items() if count > 1]
    absent = [f"{name} is exported, but not there" for name in exported if not hasattr(module, name)]
    missing = sorted(defined_names(tree_of(path)) - set(exported))
    return twice + absent + [f"{name}: export it, or start it with an underscore" for name in missing]


def test_exports_are_truthful():
    assert in_each([path for path in MODULES if is_public(path)], wrong_exports) == {}


def imported_modules(path: Path) -> Iterator[str]:
    """Every `pollux` module that a file names in an import, lazy ones and those for types included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = SOURCE.joinpath(*node.module.split("."))
            for alias in node.names:
                is_module = (inside / alias.name).is_dir() or (inside / f"{alias.name}.py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def imported_parts(package: Path) -> set[str]:
    """The other parts of its room, or rooms, that a package imports: each by its name in the last folder of both."""
    own, parts = module_name(package / "__init__.py").split("."), set()
    for target in [name.split(".") for path in package.rglob("*.py") for name in imported_modules(path)]:
        shared = next((i for i, (a, b) in enumerate(zip(own, target, strict=False)) if a != b), len(own))
        if min(2, len(own) - 1) <= shared < min(len(own), len(target)):
            parts.add(target[shared])
    return parts


def wrong_statement_of_imports(path: Path) -> str:
    said = " ".join((ast.get_docstring(tree_of(path)) or "").split())
    sentence = re.findall(r"Imports (no other part of the room|`[^.]*`)\.", said)
    if len(sentence) != 1:
        return "say once, in a sentence: Imports `one` and `another`. Or: Imports no other part of the room."
    stated, actual = set(re.findall(r"`(\w+)`", sentence[0])), imported_parts(path.parent)
    return f"it imports {sorted(actual)}" if stated != actual else ""


def test_a_package_says_which_parts_of_its_room_it_imports():
    insides = [path for path in MODULES if path.name == "__init__.py" and module_name(path).count(".") > 1]
    rooms = [SOURCE / "pollux" / room / "__init__.py" for room in ROOMS if room]
    packages = insides + [path for path in rooms if "Imports" in path.read_text()]
    assert len(packages) > 40
    assert in_each(packages, wrong_statement_of_imports) == {}


def layers_on_the_page() -> dict[str, list[set[str]]]:
    """The layers inside each room as `ARCHITECTURE.md` draws them: `upper`, `beside it` (a note) → `lower`."""
    rows = re.findall(r"^\| `([a-z/]+)/` \| (`.+→.+) \|$", (REPOSITORY / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    plain = {room: re.sub(r"\([^)]*\)", "", layers) for room, layers in rows}
    return {room: [set(re.findall(r"`(\w+)`", layer)) for layer in layers.split("→")] for room, layers in plain.items()}


def test_the_page_on_architecture_draws_the_layers_that_are_enforced():
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    drawn, wrong = layers_on_the_page(), {}
    assert drawn.keys() >= {"agent", "backends", "service", "controller", "policies", "sim", "cli", "testing"}
    for room, layers in drawn.items():
        container = f"pollux.{room.replace('/', '.')}"
        [enforced] = [one["layers"] for one in contracts if one.get("containers") == [container]]
        packages = {path.parent.name for path in (SOURCE / "pollux" / room).glob("*/__init__.py")}
        named = packages.union(*layers)
        expected = [found for layer in enforced if (found := named.intersection(layer.replace("|", " ").split()))]
        if layers != expected:
            wrong[room] = expected
    assert wrong == {}, "ARCHITECTURE.md draws these rooms otherwise than pyproject.toml"


def foreign_imports(path: Path) -> list[str]:
    allowed = ROOMS[room_of(path)]
    return [
        f"line {line}: {package}" + ("" if on_use else " (at import time)")
        for package, on_use, line in imported_packages(tree_of(path))
        if package != "pollux" and package not in sys.stdlib_module_names
        if package not in allowed.anywhere and not (on_use and package in allowed.on_use)
    ]


def test_third_party_imports_are_those_of_the_room():
    rooms = {room_of(path) for path in MODULES}
    assert sorted(rooms - set(ROOMS)) == [], "say in ROOMS which packages these may import"
    assert in_each(MODULES, foreign_imports) == {}


def test_no_file_is_too_long():
    assert in_each(MODULES, lambda path: max(0, len(path.read_text().splitlines()) - MAX_LINES)) == {}


def test_file_names_say_something():
    assert in_each(MODULES, lambda path: path.stem in {"common", "helpers", "misc", "util", "utils"}) == {}


@pytest.mark.parametrize(
    "phrase",
    [
        pytest.param(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HACK)\b", id="left open"),
        pytest.param(r"NotImplemented" + r"Error", id="stub"),
        pytest.param(r"\bif (not )?(self\.)?simulat(e|ed|ing|ion)\b", id="asks whether simulated"),
        pytest.param(r"isinstance\((self\.)?_?policy\b", id="asks a policy for its class"),
        pytest.param(r"^\s*#\s*[-=#*]{4,}", id="banner"),
    ],
)
def test_no_phrase_that_the_house_rules_forbid(phrase):
    pattern = re.compile(phrase, re.MULTILINE)
    assert in_each(MODULES, lambda path: [match.group() for match in pattern.finditer(path.read_text())]) == {}


def project_texts() -> list[Path]:
    """Every text a reader of the repository meets, apart from licence and recorded results."""
    folders = ("src", "tests", "docs", "benchmarks", "deploy", "examples", "tools", ".ci")
    inside = [path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    # In a second working tree of one clone, .git is a file that names the first.
    beside = [path for path in REPOSITORY.iterdir() if path.is_file() and path.name not in ("LICENSE", ".git")]
    endings = {".cfg", ".md", ".py", ".toml", ".txt", ".yml", ".yaml", ""}
    # Files of earlier releases are no texts of this one.
    left_out = {"__pycache__", "fixtures"}
    return [path for path in inside + beside if path.suffix in endings and not left_out.intersection(path.parts)]


def test_no_path_or_package_index_of_one_machine():
    pattern = re.compile(r"(?<![\w.~])/(?:root|work|home/\w+|opt/\w+)/|--(?:extra-)?index[-]url|file:/[/]")
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in project_texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def test_importing_pollux_loads_nothing_else():
    code = "import sys; before = set(sys.modules); import pollux; print(*set(sys.modules) - before)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert sorted(loaded - {"pollux"} - sys.stdlib_module_names) == []


def test_version_is_the_installed_one():
    import importlib.metadata

    import pollux

    assert importlib.metadata.version("pollux-scheduler") == pollux.__version__
