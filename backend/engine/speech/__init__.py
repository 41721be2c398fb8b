"""Speech-to-text models: from a recording to segments of text with times."""
