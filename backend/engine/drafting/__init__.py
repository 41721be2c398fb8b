"""Speculative decoding: guess the next tokens, and check the guesses in one forward pass.

As in https://arxiv.org/abs/2211.17192, but with the sequence's own sampler: what it chooses at a
position depends only on the seed and the number of tokens, so a guess is right if it equals that
choice, and the output is the same with and without guesses at every temperature.

A step with guesses does not overlap with the next one, because guessing needs the tokens of the
previous step. `backend.engine.planning.guess_width` decides from measured times whether guesses
pay; so a model with a head of its own drafts without being asked. Rows with images get no guesses.

What happens to wrong guesses depends on the layer:

- Attention: the length of the row becomes shorter, and later tokens overwrite the wrong ones.
- Sliding windows: the tokens of a pass replace the oldest ones only when the window is used again,
  so wrong guesses are taken back until then.
- Recurrent states are known only after the last token of a pass. The row returns to the state
  before the pass, and its right tokens are fed again together with the next one. Storing the state
  of every position would take megabytes per token.
- Grammars: a copy of the grammar looks ahead along the guesses. A thinking budget cannot be copied,
  so such a row decodes without guesses.
- Other layers store earlier tokens in a form that cannot be truncated: the load is refused.

The heads (the model's own, EAGLE-3 and DFlash) read hidden states that a pass has computed anyway.
A row's states wait until its guesser reads them (`unread_states`). A row that starts from stored KV
has states of fewer tokens, which only makes its first guesses worse.
"""
