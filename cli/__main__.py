"""`python -m cli`: the `mlx-backend` command, in this process."""

import signal
import sys

from cli.command_line import COMMAND, Interrupted
from common import inherited_signals

if __name__ == "__main__":
    try:
        sys.exit(COMMAND(sys.argv[1:]))
    except Interrupted:
        inherited_signals.accept_interrupts()
        signal.raise_signal(signal.SIGINT)
