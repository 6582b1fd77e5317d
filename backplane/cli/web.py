"""`web`: a desk over this user's runs, in a browser of this machine."""

from __future__ import annotations

import os

from backplane import config
from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.cli.start import wrong, wrong_words
from backplane.errors import install_hint

PORTS_MAX = 65_535


def serve_web(options: Options) -> int:
    if not 0 <= options.port <= PORTS_MAX:
        raise wrong_words(f"--port {options.port}: no such port", f"0 to {PORTS_MAX}")
    try:
        from backplane.web import server
    except ModuleNotFoundError as error:
        raise wrong(f"the desk needs {error.name}, which is not installed", install_hint("web")) from error
    can = "read" if options.read_only else "read and answer"

    def say(address: str, once: str) -> None:
        streams.write(f"{address}\nthis address lets its reader {can} runs here; Ctrl-C ends the server\n")
        if options.open:
            _open_browser(once)

    home = config.home(dict(os.environ))
    server.serve(home, port=options.port, read_only=options.read_only, ready=say)
    return 0


def _open_browser(once: str) -> None:
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(once,), daemon=True).start()  # Some browsers make it wait.
