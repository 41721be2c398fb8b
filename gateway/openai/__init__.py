"""OpenAI's requests and answers: schemas, translation to the wire, streams."""
