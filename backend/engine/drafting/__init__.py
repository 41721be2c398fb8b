"""Guessing ahead of the model, and checking the guesses in one forward pass.

Speculative decoding (https://arxiv.org/abs/2211.17192) with the sequence's own sampler: its choice
at a place depends on the seed and on the count of tokens alone, so a guess is right where it equals
that choice, and the output is the same with and without guesses at every temperature.
"""
