"""The messages between drivers and the controller: events in, commands out, and the spec of a job.

Made by the simulator and by the service. Imports no other part of the room.
"""
