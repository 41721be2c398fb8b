"""KV in memory: rows of one or several sequences, plain, quantised, and with a sliding window.

The cache classes are our own, but models use them like those of mlx-lm. Every row begins at column
0, and a new token is written in the column given by the length of its row. A sequence that runs
alone is the only row of its arrays. Lengths are numbers on the host, so rows join and leave without
waiting for the step in flight, and no mask is passed when all lengths are equal.

Sliding windows that have wrapped around and recurrent states cannot be truncated. A cached prefix
of such a model is usable only at its checkpoint positions, of which it stores snapshots: before the
prompt's last token, where later prompts are likely to diverge, where earlier prompts did, and at
intervals. The other layers are stored once, however many snapshots a cached prefix has.
"""
