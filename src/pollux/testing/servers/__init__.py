"""For tests of a service: a clock that tests set, and a backend whose replicas tests start and end.

Run by pytest, in its own process. Imports `waiting`.
"""
