"""Messages between agent, service and command line: plain values with a strict codec, and the job file."""
