"""`python -m gateway`: reads the settings and serves until SIGTERM."""

from __future__ import annotations

import os
import sys

from gateway import logs
from gateway.app import create_app
from gateway.arguments import BadArgument, settings_from
from gateway.models.reading import read_folder
from gateway.server import Server, bind, url_of
from gateway.supervisor.supervisor import Supervisor
from gateway.traffic import Traffic

LEVEL = "MLX_GATEWAY_LOG"


def main() -> int:
    """Run one gateway. Returns the exit code: 2 for settings that cannot be used."""
    logs.configure(os.environ.get(LEVEL, ""))
    try:
        settings = settings_from(sys.argv[1:], os.environ)
        models = read_folder(settings.models_dir)
        listener = bind(settings.host, settings.port)
    except BadArgument as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    traffic = Traffic()
    app = create_app(settings, Supervisor(settings, models), traffic)
    url = url_of(listener)
    print(f"gateway: listening on {url}", file=sys.stderr, flush=True)
    Server(app, settings, traffic).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
