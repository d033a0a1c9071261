"""The version of Pollux, in a module that every room may import."""

__all__ = ["__version__"]

__version__ = "0.1.0"
