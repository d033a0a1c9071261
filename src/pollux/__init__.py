"""Pollux: a deep-learning cluster scheduler that optimises goodput.

This module holds the version and imports nothing; the parts live in the sub-packages.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
