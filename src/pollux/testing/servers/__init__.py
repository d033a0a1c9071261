"""Servers for tests: an S3 store, a service with a clock that is moved by hand, a large made-up past."""
