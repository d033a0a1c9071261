"""Views in the form for people and tools: explanations, summaries, series, metrics.

Runs on the threads of requests. Imports `engine` and `views`.
"""
