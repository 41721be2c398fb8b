"""Mixtures of experts whose experts stay in the checkpoint's files.

Each layer has a cache of slots, and reads an expert into a slot when the router first selects it.
mlx-lm's layers compute on the slots as they would on all experts: only the numbers that the router
has selected are replaced by those of slots. For that, the host must know them before the layer can
be queued, so a pass waits for the device once in every layer (`layer_cache`). That, and the time
for reading, is the cost.
"""
