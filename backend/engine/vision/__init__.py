"""Vision and audio models: from decoded media to rows that share batches with text rows.

An image is encoded on its own, together with its placeholder tokens, so its features can be used in
any prompt. In the prompt cache, negative numbers derived from its content stand for it.
"""
