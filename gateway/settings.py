"""What the gateway as a whole is told at its start: where to listen, whom to let in, how much."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """One gateway's settings, from the command line and the environment."""

    models_dir: Path
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 50 << 20
    request_timeout: float = 600.0  # seconds that one request may take; 0: no limit
    load_timeout: float = 600.0  # seconds that a model may take to load
    keepalive_interval: float = 5.0  # seconds of silence before an SSE comment
    max_loaded_models: int = 0  # 0: no limit
    max_memory_bytes: int = 0  # of all loaded models together, as their backends tell; 0: no limit
    idle_unload: float = 0.0  # seconds without a request after which a model is unloaded; 0: never
    drain_timeout: float = 10.0  # seconds that running requests get after SIGTERM
    allow_unlisted_models: bool = False  # hub ids and local folders as `model` of a request
    allow_remote_images: bool = False
    max_image_bytes: int = 20 << 20
