"""Read models of the facts: jobs, their events, the timeline, scores of ETAs.

Runs on the engine's thread. Imports no other part of the room.
"""
