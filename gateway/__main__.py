"""`python -m gateway`: reads the settings and serves until SIGTERM."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gateway.app import create_app
from gateway.models.config import read_folder
from gateway.server import Server, bind, url_of
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor
from gateway.traffic import Traffic


def main() -> None:
    """Run one gateway."""
    parser = argparse.ArgumentParser(prog="gateway")
    parser.add_argument("--models-dir", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    settings = GatewaySettings(given.models_dir.resolve(), given.host, given.port)
    supervisor = Supervisor(settings, read_folder(settings.models_dir))
    traffic = Traffic()
    listener = bind(settings.host, settings.port)
    print(f"listening on {url_of(listener)}", file=sys.stderr, flush=True)
    Server(create_app(settings, supervisor), settings, traffic).run(sockets=[listener])


if __name__ == "__main__":
    main()
