"""The `pollux` command: one file per noun; other rooms decide and simulate."""

__all__: list[str] = []
