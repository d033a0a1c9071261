"""Why a job has its GPUs, when it will end, and what a plan will bring: read from the state, never changing it.

Called by the service. Imports everything else of the room.
"""
