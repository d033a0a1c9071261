"""Real training jobs for tests: replicas that are forked in milliseconds, supervisors, fleets, random changes."""
