"""From the reference in a load request to a model in memory."""
