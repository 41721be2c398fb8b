"""Speculative decoding: guess the next tokens, and check the guesses in one forward pass.

As in https://arxiv.org/abs/2211.17192, but with the sequence's own sampler: what it chooses at a
position depends only on the seed and the number of tokens, so a guess is right if it equals that
choice, and the output is the same with and without guesses at every temperature.
"""
