"""What drivers and the controller say to each other: events that go in, commands that come out, the spec of a job.

Made by the simulator and by the service. Imports nothing else of the room.
"""
