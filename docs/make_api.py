"""Write the table of docs/api-http.md from the operations themselves: `python docs/make_api.py`."""

from __future__ import annotations

from pathlib import Path

from pollux.service.server.app import operations

PAGE = Path(__file__).resolve().parent / "api-http.md"
BEGIN, END = "<!-- operations: docs/make_api.py -->", "<!-- end of operations -->"


def table() -> str:
    """Every operation: method and path, what it does, what it takes, what it answers."""
    lines = ["| operation | what it does | parameters | answers |", "|---|---|---|---|"]
    for operation in sorted(operations(), key=lambda found: (found.path, found.method)):
        names = [f"`{param.name}`" for param in operation.params] + [
            f"`{header['name']}`" for header in operation.headers
        ]
        body = ["a body"] if operation.takes is not None else []
        answers = ", ".join(str(code) for code in (operation.status, *operation.errors))
        cells = (f"`{operation.method} {operation.path}`", operation.about, ", ".join(body + names) or "–", answers)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def current(page: str) -> str:
    """The page with the table as it should be."""
    before, rest = page.split(BEGIN, 1)
    return before + BEGIN + "\n\n" + table() + "\n\n" + END + rest.split(END, 1)[1]


def main() -> None:
    """Write the page."""
    PAGE.write_text(current(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
