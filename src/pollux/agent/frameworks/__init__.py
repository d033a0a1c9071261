"""Training loops that are not the script's own: Lightning and Hugging Face `Trainer`.

Runs in every replica. Imports every other part of the agent; these frameworks are imported on use.
"""
