"""Training loops that a framework owns: Lightning and the Hugging Face `Trainer`.

Runs in every replica. Each framework is imported only when it is used. Imports `adaptation`, `data`, `distributed`,
`elastic`, `job`, `reporting`, `step` and `training`.
"""
