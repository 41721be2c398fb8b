"""A request's media: from text on the wire to pixels and audio samples, within limits; without MLX.

A child process decodes each video: a hostile file that crashes the decoder must not end the
backend, and the decoder's own limits do not cover all of its time and memory.
"""
