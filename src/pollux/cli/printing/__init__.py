"""All output of the command line, through one filter for control characters.

Imports nothing else of the command line.
"""
