"""A request's media: from text on the wire to pictures and sounds, within limits; without MLX."""
