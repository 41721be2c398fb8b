"""The models folder: one YAML file per model, with the keys that LocalAI's users know."""
