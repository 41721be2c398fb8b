"""`python -m gateway`: reads the settings and serves until SIGTERM."""

from __future__ import annotations

import argparse
from pathlib import Path

import uvicorn

from gateway.app import create_app
from gateway.models.config import read_folder
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor


def main() -> None:
    """Run one gateway."""
    parser = argparse.ArgumentParser(prog="gateway")
    parser.add_argument("--models-dir", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    settings = GatewaySettings(given.models_dir.resolve(), given.host, given.port)
    supervisor = Supervisor(settings, read_folder(settings.models_dir))
    uvicorn.run(create_app(settings, supervisor), host=settings.host, port=settings.port)


if __name__ == "__main__":
    main()
