"""How text reaches the terminal: through one filter, so that other people's text cannot steer it.

Everything else of the command line prints by this; it imports nothing of the command line.
"""
