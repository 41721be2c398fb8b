"""`python -m gateway`: reads the settings and serves until SIGTERM."""

from __future__ import annotations

from common import inherited_signals, standard_streams

if __name__ == "__main__":  # before the imports, so that an interrupt need not wait for them
    inherited_signals.accept_interrupts()
    standard_streams.open_closed_streams()

import gc
import os
import sys
import warnings

if __name__ == "__main__":  # imports create no garbage, but collecting takes time
    gc.disable()

# gRPC reads these when it is imported. Its own log lines are about sockets, and its handlers of a
# fork wait for calls that are running.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from pydantic.warnings import UnsupportedFieldAttributeWarning

from common.machine_memory import return_large_blocks
from gateway import logs
from gateway.app import create_app
from gateway.arguments import BadArgument, settings_from
from gateway.exchange import Traffic
from gateway.greeting import Greeting, say
from gateway.models.reading import read_folder, single
from gateway.server import MOST_PUT_OFF, Server, allow_connections, bind, url_of
from gateway.supervisor.supervisor import Supervisor

LEVEL = "MLX_GATEWAY_LOG"


def main() -> int:
    """Run one gateway. Returns the exit code: 2 for settings that cannot be used."""
    logs.configure(os.environ.get(LEVEL, ""))
    # FastAPI silences it where it makes a body's schema, but the schema is built at its first use.
    warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
    try:
        settings = settings_from(sys.argv[1:], os.environ)
        allow_connections()
        return_large_blocks()
        models = settings.models_dir
        folder = read_folder(models) if models else single(settings.model, settings.model_settings)
        listener = bind(settings.host, settings.port)
    except (BadArgument, ValueError) as error:
        say(str(error))
        return 2
    traffic = Traffic()
    supervisor = Supervisor(settings, folder)
    app = create_app(settings, supervisor, traffic)
    greeting = Greeting(url_of(listener), settings, supervisor)
    gc.freeze()  # these objects stay, and a collection that visits them would pause every stream
    gc.set_threshold(*gc.get_threshold()[:2], MOST_PUT_OFF)  # the server begins full collections
    gc.enable()
    Server(app, settings, supervisor, traffic, greeting).run(sockets=[listener])
    return 1 if greeting.failed else 0


if __name__ == "__main__":
    sys.exit(main())
