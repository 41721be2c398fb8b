"""Speculative decoding: draft the next tokens, and check them in one forward pass.

As in https://arxiv.org/abs/2211.17192, but with the sequence's own sampler. The sampler's choice at
a position depends only on the seed and the number of tokens. A draft token is right if it equals
this choice, so the output is the same with and without drafting, at every temperature.

A step that checks draft tokens does not overlap with the next one, because drafting needs the
tokens of the step before. `backend.engine.planning.draft_width` decides from measured times whether
drafting saves time, so a model with its own head drafts by default. No tokens are drafted for
sequences with images.

What happens to wrong draft tokens depends on the layer:

- Attention: the sequence's length is reduced, and later tokens overwrite the wrong ones.
- Sliding windows: the tokens of a pass are written into the window only when the window is used
  again. Until then, wrong tokens can be removed.
- Recurrent states are known only after the last token of a pass. The sequence returns to the state
  before the pass, and its right tokens are fed again with the next one. Storing the state of every
  position would take megabytes per token.
- Grammars: a copy of the grammar follows the draft tokens. A thinking budget cannot be copied, so
  such a sequence decodes without draft tokens.
- Layers that store earlier tokens in a form that cannot be truncated: the model does not draft, and
  a load that asks for drafting is refused.
"""
