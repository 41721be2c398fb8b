"""Vision and audio models: from decoded media to rows that share batches with text rows."""
