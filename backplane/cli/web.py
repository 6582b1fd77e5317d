"""`web`: a page over this user's runs, in a browser of this machine."""

from __future__ import annotations

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config

PORTS_MAX = 65_535


def parser(name: str) -> Parser:
    """The options of `web`."""
    about = (
        "Show runs in a browser of this machine: live ones as they go on, their questions answered there, new ones "
        "started in the folders of `[web] roots`. Ctrl-C ends it, and the runs that it started."
    )
    made = Parser(f"backplane {name}", about, "backplane web\nbackplane web --read-only --port 8765", _web)
    made.add_argument("--port", metavar="N", type=int, default=0, help="on 127.0.0.1 (any that is free)")
    made.add_argument("--read-only", action="store_true", help="nothing can be answered, cancelled or started there")
    made.add_argument("--open", action="store_true", help="open it in the browser, with a code that serves once")
    add_config(made)
    return made


def _web(options: Options) -> int:
    import os
    from pathlib import Path

    from backplane import config
    from backplane.errors import ConfigError

    if not 0 <= options.port <= PORTS_MAX:
        raise ConfigError("config_invalid", f"--port {options.port} is no port", hint=f"0 to {PORTS_MAX}")
    try:
        from backplane.web import server
    except ModuleNotFoundError as error:
        fact = f"the page needs {error.name}, which is not installed"
        raise ConfigError("config_invalid", fact, hint="pip install 'backplane[web]'") from error
    environ = dict(os.environ)
    settings = config.load(Path(options.config) if options.config else None, environ, streams.folder())
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
        streams.complain(streams.one_line(line) + "\n")
    return 0


def _open_browser(once: str) -> None:
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(once,), daemon=True).start()  # Some browsers make it wait.
