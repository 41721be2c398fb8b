"""The process and its RPCs: protobuf in, our dataclasses to the engine, protobuf out."""
