"""The `pollux` command: one file per noun; decisions and simulations are made elsewhere."""

__all__: list[str] = []
