"""`web`: a page over this user's runs, in a browser of this machine."""

from __future__ import annotations

import os

from backplane import config
from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.cli.start import load_settings, wrong, wrong_words
from backplane.errors import install_hint

PORTS_MAX = 65_535


def serve_web(options: Options) -> int:
    if not 0 <= options.port <= PORTS_MAX:
        raise wrong_words(f"--port {options.port} is no port", f"0 to {PORTS_MAX}")
    try:
        from backplane.web import server
    except ModuleNotFoundError as error:
        raise wrong(f"the page needs {error.name}, which is not installed", install_hint("web")) from error
    environ = dict(os.environ)
    settings = load_settings(options)
    can = "read" if options.read_only else "answer and start"

    def say(address: str, once: str) -> None:
        streams.write(f"{address}\nwhoever has this address can {can} runs here; Ctrl-C ends it\n")
        if options.open:
            _open_browser(once)

    left = server.serve(
        settings, config.home(environ), environ, port=options.port, read_only=options.read_only,
        ready=say,
    )  # fmt: skip
    for line in left:
        streams.note(line)
    return 0


def _open_browser(once: str) -> None:
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(once,), daemon=True).start()  # Some browsers make it wait.
