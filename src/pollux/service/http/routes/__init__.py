"""What each address of the API does, a module for each noun.

Runs in the service. Imports `auth`, `engine`, `presenters`, `replay`, `settings` and `views`; beside it `operations`,
`readiness`, `schemas`, `shared_cache`, `sse` and `uploads`.
"""
