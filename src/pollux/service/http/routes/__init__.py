"""What each address of the API does, a module for each noun.

Runs in the service. Imports the parts of `http` that are shared, and what is below them.
"""
