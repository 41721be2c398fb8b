"""The models folder: one YAML file a model, in the terms that LocalAI's users know."""
