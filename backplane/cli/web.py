"""`web`: a desk over this user's runs, in a browser of this machine."""

from __future__ import annotations

import os
import threading
import webbrowser

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, wrong, wrong_words
from backplane.errors import install_hint

PORTS_MAX = 65_535

HELP = """Serve a web page for browsers on this machine. It shows all runs, and lets you answer questions, cancel
runs, apply patches and rewind workspaces. Ctrl-C ends the server."""
EXAMPLE = "backplane web\nbackplane web --read-only --port 8765"


def options(p: Parser) -> None:
    add.value(p, "--port", metavar="N", type=int, default=0, help="port on 127.0.0.1 (default: any free port)")
    add.flag(p, "--read-only", help="read-only: show runs, but accept no answers to questions and no changes")
    add.flag(p, "--open", help="open the page in the browser")


def run(args: Args) -> int:
    if not 0 <= args.port <= PORTS_MAX:
        raise wrong_words(f"--port {args.port} is out of range", f"give a number from 0 to {PORTS_MAX}")
    try:
        from backplane.web import server
    except ModuleNotFoundError as error:
        raise wrong(f"`backplane web` needs {error.name}, which is not installed", install_hint("web")) from error
    can = "read the runs" if args.read_only else "read the runs, answer questions and apply patches"

    def say(address: str, once: str) -> None:
        streams.write(f"{address}\nwhoever knows this address can {can}; Ctrl-C ends the server\n")
        if args.open:
            # Some browsers make their caller wait.
            threading.Thread(target=webbrowser.open, args=(once,), daemon=True).start()

    home = config.home(dict(os.environ))
    server.serve(home, port=args.port, read_only=args.read_only, ready=say)
    return 0
