"""What is known, as people and tools get it: explanations, summaries, series, metrics.

Runs on the threads of requests. Imports `engine` and `views`.
"""
