"""The time that passed for jobs: jumps of the machine's clock are left out, and run times are measured.

Called by the engine. `settings.clock` is the clock itself.
"""
