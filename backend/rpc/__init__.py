"""The process and its RPCs: protobuf requests to our dataclasses, and answers to protobuf."""
