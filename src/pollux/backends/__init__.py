"""Where replicas run: adapters with one protocol, found by name, each imported on use."""

from pollux.backends.registry import available, create, head_of, load, names, option_kinds, options, summary

__all__ = ["available", "create", "head_of", "load", "names", "option_kinds", "options", "summary"]
