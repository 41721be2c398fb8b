"""The process and its RPCs: converts protobuf requests to our dataclasses, and answers back."""
