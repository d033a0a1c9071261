"""Decides which replica reads which samples: the order of a pass, the loader, the ledger of samples used.

Runs in every replica. `loader`, `batch_reader`, `order`, `ledger`, `step_shape` and `stream_position` need no
framework. PyTorch's part is `torch_reader` with `stream`, `sample_reader`, `permutation` and `random_numbers`. Imports
no other part of the room.
"""
