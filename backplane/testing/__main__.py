"""`python -m backplane.testing SCRIPT.json`: the scripted model server as a process of its own.

Its port is the first line on stdout; requests go as JSON lines to the file that `--record` names. It ends with
SIGTERM, SIGINT, or when its time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from backplane.errors import ContractError
from backplane.testing.server import ModelServer

LIFE_S_MAX: Final = 3600
"""A server that a killed test left behind is gone after an hour."""
EXIT_USAGE: Final = 2


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m backplane.testing", description=__doc__)
    parser.add_argument("script", type=Path, help="file with the script as JSON: an object, or a list of turns")
    parser.add_argument("--record", type=Path, help="append each request to this file, as a line of JSON")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 for any free port (default: 0)")
    parser.add_argument("--seconds", type=int, default=LIFE_S_MAX, help="end after this many seconds (default: 3600)")
    options = parser.parse_args()
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    try:
        with ModelServer(json.loads(options.script.read_bytes()), record=options.record, port=options.port) as server:
            os.write(1, f"{server.port}\n".encode())
            over.wait(options.seconds)
    except (ContractError, OSError, ValueError) as error:
        os.write(2, f"model server: {error}\n".encode())
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
