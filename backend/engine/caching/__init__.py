"""KV in memory: rows of one or several sequences, plain, quantised, and with a sliding window.

The cache classes are our own, and models cannot tell them from mlx-lm's. Every row begins at column
0, and a token is written at the length of its own row. A sequence that runs alone is the only row
of its arrays. Lengths are numbers on the host, so rows join and leave without waiting for the step
in flight, and no mask is passed when all lengths are equal.

Sliding windows that have wrapped around and recurrent states cannot be truncated. An entry of such
a model is usable only at a snapshot: before a prompt's last token, where later prompts are likely
to diverge, where earlier ones did, and at intervals. The other layers are stored once, however many
snapshots an entry has.
"""
