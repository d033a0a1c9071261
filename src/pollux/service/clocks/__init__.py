"""Time that has passed for jobs: jumps of the machine's clock are told from it, and run times are measured.

Called by the engine. `settings.clock` is the clock itself.
"""
