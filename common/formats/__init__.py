"""The output formats of model families, one small module per grammar."""
