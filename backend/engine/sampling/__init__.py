"""From logits to tokens: log-probabilities, bias and penalties, filters, and one vectorised draw.

Nothing here waits for the device. Penalties count a row's tokens on the device, and rows without
penalties cost nothing. Random numbers are a hash of a row's seed and of the row's token count, so
no other row can change them; the keys of 16 steps are copied to the device together.
"""
