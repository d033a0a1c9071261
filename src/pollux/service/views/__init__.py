"""What is known, kept ready to be read: jobs, their events, the timeline, scores of ETAs. Made from facts alone.

Runs on the engine's thread. Imports no other part of the room but `settings`.
"""
