"""The time that passed for jobs: jumps of the machine's clock are left out, and run times are measured.

Runs on the engine's thread. The clock itself is `settings.clock`. Imports `settings`.
"""
