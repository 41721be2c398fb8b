"""Mixtures of experts whose experts stay in the checkpoint's files.

Each layer has a cache with a number of slots in memory. When the router selects an expert that is
in no slot, the expert is read into a slot. mlx-lm's layers compute with the slots as they would
with all experts; only the expert numbers from the router are replaced by slot numbers.

The cost is the time for reading, and one wait for the device in every layer of a pass, because the
host must know the selected experts before it can queue the layer.
"""
