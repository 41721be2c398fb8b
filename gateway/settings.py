"""The settings of the gateway itself: address, access and limits.

The command line (gateway/arguments.py) and the table in docs/gateway.md are generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

Kind = Literal["text", "path", "count", "bytes", "seconds", "switch", "texts", "keys"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a setting is written on the command line, and what it does."""

    kind: Kind
    meaning: str
    minimum: float = 0
    maximum: float = 1e15


def setting(
    default: Any, kind: Kind, meaning: str, minimum: float = 0, maximum: float = 1e15
) -> Any:
    return field(default=default, metadata={"rule": Rule(kind, meaning, minimum, maximum)})


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """One gateway's settings, from the command line and the environment."""

    models_dir: Path | None = field(
        default=None,
        metadata={"rule": Rule("path", "Folder of YAML files, one per model; or give --model.")},
    )
    model: str = setting(
        "", "text", "The only model to serve: a folder or a hub id. The gateway loads it at start."
    )
    model_settings: tuple[str, ...] = setting(
        (),
        "texts",
        "`KEY=VALUE`: a key of a model file for --model, such as context_size=8192,"
        " parameters.temperature=0.5 or engine_args.parallel=4; may be repeated.",
    )
    host: str = setting("127.0.0.1", "text", "Address to listen on; any but loopback needs a key.")
    port: int = setting(8080, "count", "Port to listen on; 0 picks a free one.", 0, 65_535)
    api_keys: tuple[str, ...] = setting(
        (),
        "keys",
        "A key that clients may use, or `NAME KEY` to log the name with each request; may be"
        " repeated. Other users can see a command line: prefer MLX_GATEWAY_API_KEYS (separated by"
        " commas) or --api-key-file (one per line).",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "texts",
        "An origin such as http://localhost:3000 whose pages may call the API; may be repeated."
        " * means any, and needs a key.",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "texts",
        "Another host name under which a gateway without a key may be called; may be repeated.",
    )
    max_body_bytes: int = setting(50 << 20, "bytes", "Largest request body.", 1024)
    request_timeout: float = setting(600.0, "seconds", "Longest time for one request; 0: no limit.")
    load_timeout: float = setting(
        600.0,
        "seconds",
        "Longest time for loading a model, apart from a download that makes progress.",
        1,
    )
    keepalive_interval: float = setting(
        3.0, "seconds", "Silence in a stream after which a keep-alive event is sent.", 0.05, 3600
    )
    max_loaded_models: int = setting(
        0, "count", "Maximum number of models loaded at a time; 0: no limit."
    )
    max_memory_bytes: int | None = setting(
        None,
        "bytes",
        "Maximum memory of all loaded models, as reported by their backends; 0: no limit. By"
        " device: the memory of the device or the container, less a reserve.",
    )
    keep_responses: float = setting(
        86_400.0,
        "seconds",
        "Time that a response of /responses is stored after its last use; 0: none is stored.",
    )
    idle_unload: float = setting(
        0.0, "seconds", "Time without a request after which a model is unloaded; 0: never."
    )
    drain_timeout: float = setting(
        10.0, "seconds", "Time that running requests get to finish after SIGTERM.", 0, 86_400
    )
    forget_prompts: bool = setting(
        False,
        "switch",
        "Do not store the most used system prompts and tools for the next start, which reads them"
        " ahead.",
    )
    allow_unlisted_models: bool = setting(
        False, "switch", "Let requests name any hub id (`owner/name`) as their model."
    )
    allow_remote_images: bool = setting(
        False, "switch", "Fetch image and video URLs in requests, from public addresses only."
    )
    strict: bool = setting(
        False, "switch", "Refuse unknown and meaningless fields instead of ignoring them."
    )
    max_image_bytes: int = setting(
        20 << 20, "bytes", "Largest image, video or audio in a request.", 1024
    )

    @property
    def folder(self) -> Path:
        """The folder to which relative paths of checkpoints refer."""
        return self.models_dir or Path.cwd()


def is_loopback(name: str) -> bool:
    """Return whether this is a loopback address itself, not a name that resolves to one."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
