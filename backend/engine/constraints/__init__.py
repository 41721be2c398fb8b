"""Grammar-constrained decoding: from a request's constraints to masks of allowed tokens.

A grammar has to see a token before it knows what may follow. So when a batch has a constrained row,
tokens are read and masks are computed while the next forward pass runs; only sampling waits. All
rows wait for every mask, and a mask cannot be interrupted, so the limits of a matcher (`matching`)
keep it to a tenth of a second. A grammar may take half a second of processor time, and 10 ms more
for each token; a row that exceeds this fails alone. `backend.engine.planning.mask_share` preempts
rows whose grammars take too much of the others' time.

A forced tool call is a grammar in the model's own call format, so the parser that reads free calls
reads it too.
"""
