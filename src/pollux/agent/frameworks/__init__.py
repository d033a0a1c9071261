"""Training loops that a framework owns: Lightning and the Hugging Face `Trainer`.

Runs in every replica. Imports every other part of the agent. Each framework is imported only when it is used.
"""
