"""`gateway`: one address for the model requests of any client, in front of any configured service."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from backplane import config
from backplane.cli import options as add
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load_settings, wrong_words
from backplane.errors import ConfigError
from backplane.gateway.programs import PROGRAMS

if TYPE_CHECKING:
    from backplane.gateway.serving import Gateway

HELP = """Serve the interfaces of OpenAI (Chat and Responses), Anthropic and Gemini, and answer each model by the
service that `[gateway.models]` names, whatever protocol it speaks. Ctrl-C ends the server."""
EXAMPLE = "backplane gateway\nbackplane gateway --for claude -- claude -p 'say hello'\nbackplane gateway --new-key ci"
LOOPBACK = "127.0.0.1"
CLIENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def options(p: Parser) -> None:
    address = "IP address to listen on (default: `address` of [gateway], 127.0.0.1; with --for always 127.0.0.1)"
    add.value(p, "--address", metavar="ADDR", help=address)
    port = "port, 0 for any free one (default: `port` of [gateway]; with --for any free one)"
    add.value(p, "--port", metavar="N", type=int, help=port)
    start = "start COMMAND so that it asks the gateway, and end with it"
    add.value(p, "--for", dest="program", choices=sorted(PROGRAMS), help=start)
    add.value(p, "--new-key", metavar="NAME", help="print a new key and the lines of the configuration for it, and end")
    add.config(p)
    p.add_argument("command", nargs="*", metavar="COMMAND", help="with --for: program and arguments, after --")


def run(args: Args) -> int:
    from backplane.gateway.clients import digest, new_key

    if args.new_key is not None:
        if not CLIENT.fullmatch(args.new_key):
            raise wrong_words(f"--new-key {args.new_key[:80]!r} is no name", "use letters, digits, '.', '_' and '-'")
        key = new_key()
        streams.write(f'{key}\n\n[gateway.clients."{args.new_key}"]\nkey_sha256 = "{digest(key)}"\n')
        return 0
    if bool(args.command) != (args.program is not None):
        raise wrong_words("--for and a COMMAND belong together", "as in `--for claude -- claude -p 'say hello'`")
    if args.program is not None and args.address is not None:
        raise wrong_words("--address with --for has no effect", "a program that it starts asks it on 127.0.0.1")
    settings = load_settings(args)
    port = args.port if args.port is not None else 0 if args.program else settings.gateway.port
    address = LOOPBACK if args.program else args.address or settings.gateway.address
    with _listen(_checked(address, settings.gateway), port) as listener:
        return anyio.run(_serve, settings, listener, args)


def _checked(text: str, settings: config.GatewaySettings) -> IPv4Address | IPv6Address:
    """Return the address to listen on. Raises ConfigError: it is none, or others reach it and no client has a key."""
    try:
        found = ip_address(text)
    except ValueError as error:
        hint = "give one of this machine, as 127.0.0.1 or 10.0.0.5; 0.0.0.0 is all of them"
        raise ConfigError(
            "config_invalid", f"the gateway's address {text[:80]!r} is no IP address", hint=hint
        ) from error
    if not found.is_loopback and not settings.clients:
        fact = f"other machines reach {found}, and no client of the gateway has a key"
        hint = "`backplane gateway --new-key NAME` prints a key and its lines for the configuration"
        raise ConfigError("config_invalid", fact, hint=hint)
    return found


def _listen(address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        listener = socket.create_server((str(address), port), family=family)
    except (OSError, OverflowError) as error:
        fact = f"cannot listen on port {port} of {address}: {getattr(error, 'strerror', None) or error}"
        hint = "choose an address of this machine and a free port; --port 0 takes any free one"
        raise ConfigError("config_invalid", fact, hint=hint) from error
    listener.setblocking(False)
    if not address.is_loopback:
        streams.complain("gateway: plain HTTP, also for other machines: a proxy in front of it has to add TLS\n")
    return listener


async def _serve(settings: config.Settings, listener: socket.socket, args: Args) -> int:
    from backplane.gateway.clients import new_key
    from backplane.gateway.serving import open_gateway

    environ = dict(os.environ)
    needs_key = args.program is not None or not settings.gateway.clients
    key = new_key() if needs_key else None
    home = config.home(environ)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with AsyncExitStack() as opened:
            agents = None
            if settings.gateway.agents:
                from backplane.gateway.agents import agent_targets
                from backplane.runtime.plane import ControlPlane  # 30 ms, which no other gateway needs.

                agents = agent_targets(
                    await opened.enter_async_context(ControlPlane(settings, home, environ)), settings.gateway.agents
                )
            gateway = await opened.enter_async_context(
                open_gateway(settings, environ, home, listener, only_key=key, agents=agents)
            )
            if key is not None and args.program is not None:
                code = await _run_program(gateway, key, args, environ, signals)
                streams.complain(_failures(gateway.record))
                return code
            streams.write(f"{gateway.url}\n" + (f"key {key}\n" if key is not None else ""))
            return 128 + await anext(signals)


def _failures(record: Path) -> str:
    """Return a line about requests that failed, empty if none did: programs repeat them without a word."""
    from backplane.gateway.journal import lines_of
    from backplane.gateway.record import ExchangeEnd

    ends = [line for line in lines_of(record) if isinstance(line, ExchangeEnd)]
    failed = [line for line in ends if line.end in ("failed", "refused") and line.error is not None]
    if not failed:
        return ""
    last = streams.one_line(f"{failed[-1].code}: {failed[-1].error}")
    return f"gateway: {len(failed)} of {streams.count(len(ends), 'request')} failed; the last: {last}\n"


async def _run_program(
    gateway: Gateway, key: str, args: Args, environ: dict[str, str], signals: AsyncIterator[signal.Signals]
) -> int:
    """Run the program until it ends; return its exit code."""
    from backplane.process.launch import StartCommand
    from backplane.process.spawn import spawn_foreground

    pointed = PROGRAMS[args.program](gateway.url, key, [row.name for row in gateway.routes.models()])
    # The program's commands could read the keys of the services.
    without = {*pointed.without, *(name for one in gateway.routes.endpoints() for name in one.variables)}
    env = {name: value for name, value in environ.items() if name not in without} | pointed.env
    first, *rest = args.command
    command = StartCommand(argv=(first, *pointed.arguments, *rest), env=env, cwd=str(streams.folder()))
    program = spawn_foreground(command)
    async with anyio.create_task_group() as tasks:

        async def pass_signals() -> None:
            async for number in signals:
                if number == signal.SIGTERM or not _has_terminal():  # A terminal sends SIGINT to the program, too.
                    program.send_signal(number)

        tasks.start_soon(pass_signals)
        code = await anyio.to_thread.run_sync(program.wait)
        tasks.cancel_scope.cancel()
    return code if code >= 0 else 128 - code


def _has_terminal() -> bool:
    """Return True if Ctrl-C of a terminal reaches our process group; two of them end some programs at once."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
