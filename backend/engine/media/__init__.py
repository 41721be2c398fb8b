"""Media of a request: from text on the wire to pictures and sounds, bounded and without MLX."""
