"""What each address of the API does, a module for each noun.

Runs in the service. Imports `auth`, `clocks`, `engine`, `presenters`, `replay`, `settings` and `views`; beside it
`foreign_reads`, `operations`, `readiness`, `schemas`, `shared_cache`, `sse` and `uploads`.
"""
