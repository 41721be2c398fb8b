"""The image's HEALTHCHECK: succeeds if the gateway answers where its command line says.

The argument is the file with the command line of the container's first process.
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.request
from pathlib import Path

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(command_line: Path) -> int:
    """Ask the gateway for its health. Returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default=os.environ.get("MLX_GATEWAY_HOST", "127.0.0.1"))
    parser.add_argument("--port", default=os.environ.get("MLX_GATEWAY_PORT", "8080"))
    words = command_line.read_text().split("\0")
    where, _ = parser.parse_known_args(words)
    host = EVERYWHERE.get(where.host, where.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{where.port}/health"
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError as error:
        print(f"{url}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
