"""Vision and audio models: from decoded media to rows that share batches with text rows.

An image is encoded separately, together with its placeholder tokens, so its features can be used in
any prompt. In the keys of the prompt cache, negative numbers replace the image's tokens; they are
derived from its content.
"""
