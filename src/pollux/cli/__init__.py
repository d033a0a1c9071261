"""The `pollux` command: one file per noun; it decides and simulates nothing itself."""

__all__: list[str] = []
