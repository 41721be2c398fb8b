"""Grammar-constrained decoding: from a request's constraints to masks of allowed tokens.

A grammar has to read a token before it can compute which tokens may follow. So when a batch has a
constrained row, tokens are read and masks are computed while the next forward pass runs; only
sampling waits. All rows wait for every mask, and a mask cannot be interrupted, so the limits of a
matcher (`matching`) bound the time of a mask to a tenth of a second. A grammar may take half a
second of processor time, and 10 ms more for each token; a row that exceeds this fails alone.
`backend.engine.planning.mask_share` preempts rows whose grammars take too much of the others' time.

A forced tool call is a grammar in the model's own call format, so the same parser reads calls that
are forced and calls that are not.
"""
