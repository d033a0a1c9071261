"""The version, where every part may read it without importing the package's front door."""

__all__ = ["__version__"]

__version__ = "0.1.0"
