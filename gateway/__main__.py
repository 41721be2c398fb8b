"""`python -m gateway`: reads the settings and serves until SIGTERM."""

from __future__ import annotations

from common import inherited_signals, standard_streams

if __name__ == "__main__":  # here, so that an interrupt need not wait for the imports
    inherited_signals.accept_interrupts()
    standard_streams.open_closed_streams()

import gc
import json
import os
import sys

from common.machine_memory import return_large_blocks
from gateway import logs
from gateway.app import create_app
from gateway.arguments import BadArgument, settings_from
from gateway.models.config import ModelConfig
from gateway.models.reading import read_folder
from gateway.server import CannotListen, Server, allow_connections, bind, url_of
from gateway.settings import GatewaySettings
from gateway.supervisor.supervisor import Supervisor
from gateway.traffic import Traffic

LEVEL = "MLX_GATEWAY_LOG"


def main() -> int:
    """Run one gateway. Returns the exit code: 2 for settings that cannot be used."""
    logs.configure(os.environ.get(LEVEL, ""))
    try:
        settings = settings_from(sys.argv[1:], os.environ)
        allow_connections()
        return_large_blocks()
        listener = bind(settings.host, settings.port)
    except (BadArgument, CannotListen) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    folder = read_folder(settings.models_dir)
    traffic = Traffic()
    supervisor = Supervisor(settings, folder)
    app = create_app(settings, supervisor, traffic)
    for line in greeting(url_of(listener), settings, folder.models):
        print(f"gateway: {line}", file=sys.stderr, flush=True)
    gc.freeze()  # these objects stay, and searching them for garbage would pause every stream
    Server(app, settings, supervisor, traffic).run(sockets=[listener])
    return 0


def greeting(url: str, settings: GatewaySettings, models: list[ModelConfig]) -> list[str]:
    """The gateway's address, and a command that shows that it works."""
    lines = [f"listening on {url}"]
    if not models:
        return [*lines, "there is no model yet: put a YAML file into the models folder"]
    key = " -H 'Authorization: Bearer '$KEY" if settings.api_keys else ""
    question = {"model": models[0].name, "messages": [{"role": "user", "content": "Hello!"}]}
    # A name may contain an apostrophe; JSON escapes it in a way that the shell leaves alone.
    body = json.dumps(question).replace("'", "\\u0027")
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return [*lines, f"try: {curl}"]


if __name__ == "__main__":
    sys.exit(main())
