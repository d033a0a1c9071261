"""`pollux backends`: where jobs can run, and what is missing."""

from __future__ import annotations

from pollux.cli.arguments.options import Json, print_json

__all__ = ["backends"]


def backends(as_json: Json = False) -> None:
    """List the backends, and what is missing for those that do not work here.

    Example: pollux backends
    """
    import pollux.backends as registry

    entries = []
    for name in registry.names():
        missing = registry.available(name)
        entries.append(
            {"name": name, "summary": registry.summary(name), "available": missing is None, "missing": missing}
        )
    if as_json:
        print_json({"backends": entries})
        return
    from rich.text import Text

    from pollux.cli.display.render import print_table, standard_output
    from pollux.cli.display.tables import plain_table

    table = plain_table("backend", "works here", "what it is")
    for entry in entries:
        works = Text("yes", style="green") if entry["available"] else Text("no", style="red")
        table.add_row(Text(str(entry["name"])), works, Text(str(entry["summary"])))
    console = standard_output()
    print_table(console, table)
    # These go below the table: they have commands to copy, which a column would wrap.
    for entry in entries:
        if not entry["available"]:
            console.print(Text(f"{entry['name']} does not work here: {entry['missing']}"), soft_wrap=True)
