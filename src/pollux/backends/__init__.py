"""Where replicas run: adapters behind one protocol, by name; each loaded on use."""

from pollux.backends.registry import available, create, head_of, load, names, option_kinds, options, summary

__all__ = ["available", "create", "head_of", "load", "names", "option_kinds", "options", "summary"]
