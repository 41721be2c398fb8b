"""Decodes a request's media, from strings on the wire to pixels and audio samples, without MLX.

Everything is limited in size and time. A child process decodes each video, because a hostile file
that crashes the decoder must not end the backend, and the decoder does not limit all of its time
and memory.
"""
