"""From messages to tokens: chat templates, quoted text, infill. Never needs MLX."""
