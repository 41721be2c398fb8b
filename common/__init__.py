"""Pure Python shared by backend and gateway: text in, data out; no grpc, no mlx, no I/O."""
