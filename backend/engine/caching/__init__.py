"""KV in memory: of one sequence, of batches, quantised, and of sliding windows.

Batched KV is in cache classes of our own, which models cannot tell from mlx-lm's. Their lengths are
numbers on the host, so rows join and leave without waiting for the step in flight, and no mask is
passed when all lengths are equal.

Sliding windows that have wrapped around and recurrent states cannot be truncated. An entry of such
a model is usable only at a snapshot: before a prompt's last token, where later prompts are likely
to diverge, where earlier ones did, and at intervals. The other layers are stored once, however many
snapshots an entry has.
"""
