"""The executor, which carries out plans in prefill passes and decode steps.

The executor owns the model and all KV. A sequence that waits between prefill passes has the index
of its row, and not the arrays of its KV: MLX copies an array in full on write if anything else
refers to it. A Score is a row that never decodes (`scoring`).

On a GPU, while other sequences decode, the pass that ends a prompt stays in flight behind the next
decode step, and its token is delivered after that step. On a CPU a first token is delivered as soon
as its pass is done. With 128 MiB of weights or more, each step's tokens are read in the same
step: launching a step there takes about as long as the step, so a later read would come a whole
step late. For smaller models the overlap is worth more.
"""
