"""Pure Python shared by backend and gateway: from strings to data, without grpc or mlx."""
