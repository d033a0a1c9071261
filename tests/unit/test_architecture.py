"""What the house rules say about every module: docstring, exports, size, names, third-party imports.

Which room may import which is checked by import-linter, and the order inside ``__all__`` by ruff, both in
``make check``.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
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
    "wire": third_party(on_use="fsspec ruamel"),
    "store": third_party(),
    "backends": third_party(on_use="pynvml torch"),
    "service": third_party("pydantic starlette", on_use="numpy uvicorn"),
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


def for_each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(SOURCE)) for path in paths])


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


@for_each(MODULES)
def test_module_says_what_lives_in_it(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@for_each([path for path in MODULES if is_public(path)])
def test_exports_are_truthful(path):
    module = importlib.import_module(module_name(path))
    tree = ast.parse(path.read_text())
    # A package that is nothing but its docstring exports nothing.
    exported = getattr(module, "__all__", [] if path.name == "__init__.py" and len(tree.body) == 1 else None)
    assert exported is not None, f"{path} has no __all__"
    assert len(exported) == len(set(exported)), "a name is exported twice"
    assert [name for name in exported if not hasattr(module, name)] == [], "exported, but not there"
    missing = defined_names(tree) - set(exported)
    assert sorted(missing) == [], "public, but not in __all__: export it or start it with an underscore"


@for_each(MODULES)
def test_third_party_imports_are_those_of_the_room(path):
    room = room_of(path)
    assert room in ROOMS, f"say in ROOMS which packages {room!r} may import"
    allowed = ROOMS[room]
    offending = [
        f"line {line}: {package}" + ("" if on_use else " (at import time)")
        for package, on_use, line in imported_packages(ast.parse(path.read_text()))
        if package != "pollux" and package not in sys.stdlib_module_names
        if package not in allowed.anywhere and not (on_use and package in allowed.on_use)
    ]
    assert offending == []


@for_each(MODULES)
def test_file_is_not_too_long(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@for_each(MODULES)
def test_file_name_says_something(path):
    assert path.stem not in {"common", "helpers", "misc", "util", "utils"}


@for_each(MODULES)
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
def test_no_phrase_that_the_house_rules_forbid(path, phrase):
    found = [match.group() for match in re.finditer(phrase, path.read_text(), re.MULTILINE)]
    assert found == []


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
