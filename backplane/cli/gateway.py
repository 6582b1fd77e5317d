"""`gateway`: one address for the model requests of any client, in front of any configured service."""

from __future__ import annotations

import os
import signal
import socket

import anyio

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load_settings
from backplane.errors import ConfigError

HELP = """Serve the interfaces of OpenAI (Chat and Responses), Anthropic and Gemini on 127.0.0.1, and answer each
model by the service that `[gateway.models]` names, whatever protocol it speaks. Ctrl-C ends the server."""
EXAMPLE = "backplane gateway\nbackplane gateway --port 4180\nbackplane gateway --new-key ci"


def options(p: Parser) -> None:
    add.value(
        p, "--port", metavar="N", type=int, help="port on 127.0.0.1 (default: `port` of [gateway]; 0: any free port)"
    )
    add.value(p, "--new-key", metavar="NAME", help="print a new key and the lines of the configuration for it, and end")
    add.config(p)


def run(args: Args) -> int:
    from backplane.gateway.clients import digest, new_key  # The other commands do not need it.

    if args.new_key is not None:
        key = new_key()
        streams.write(f'{key}\n\n[gateway.clients.{args.new_key}]\nkey_sha256 = "{digest(key)}"\n')
        return 0
    environ = dict(os.environ)
    settings = load_settings(args)
    port = settings.gateway.port if args.port is None else args.port
    only_key = None if settings.gateway.clients else new_key()
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        fact = f"cannot listen on port {port} of 127.0.0.1: {getattr(error, 'strerror', None) or error}"
        raise ConfigError("config_invalid", fact, hint="choose another port, or --port 0 for any free port") from error
    with listener:
        listener.setblocking(False)
        anyio.run(_serve, settings, environ, listener, only_key)
    return 0


async def _serve(settings: config.Settings, environ: dict[str, str], listener: socket.socket, key: str | None) -> None:
    from backplane.gateway import open_gateway

    async with open_gateway(settings, environ, config.home(environ), listener, only_key=key) as gateway:
        streams.write(f"http://127.0.0.1:{gateway.port}\n")
        if key is not None:
            streams.write(f"key {key}\n")
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                return
