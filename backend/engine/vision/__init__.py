"""Images and sounds in a prompt: from decoded media to rows of the same batch as text."""
