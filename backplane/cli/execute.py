"""Running one work order by the options of `run`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import anyio

from backplane import config
from backplane.cli import asking, follow, order, streams
from backplane.cli.command import Args, load_settings, wrong
from backplane.cli.result_file import ResultFile
from backplane.cli.run import LAST
from backplane.config import Settings, absolute_command
from backplane.contract.canonical import Json
from backplane.contract.work import REPLAY
from backplane.errors import BackplaneError
from backplane.receipts.journal import backend_name
from backplane.receipts.store import Store
from backplane.runtime import backends, hooks, readiness, replay
from backplane.runtime.backends import Backend
from backplane.view.values import as_object

RUNS_MAX: Final = 1000
"""Most runs that are read to find the last conversation, newest first: a row takes some 20 µs."""


def execute(args: Args) -> int:
    cwd, environ = streams.folder(), dict(os.environ)
    # No next order waits for a warm host.
    settings = load_settings(args, {"run_s": args.timeout, "isolation": args.isolation, "warm_max": 0})
    on_ask, home = _on_ask(args, cwd, environ), config.home(environ)
    work, own = hooks.taken(order.build(args, environ, cwd, settings.policy))
    name = args.backend or work.abp("backend") or (None if args.prefer else settings.default_backend)
    wanted = _conversation(args, home, None if args.sidecar else name)
    route = {**as_object(work.abp("route")), "preference": args.prefer} if args.prefer else None
    work = order.with_settings(work, {**wanted, "route": route})
    named = _named(args, name, settings, environ, home)
    written = [option for option in ("receipt", "patch", "run_id_file") if getattr(args, option) is not None]
    if args.dry_run:
        from backplane.cli import dry_run  # Other runs do not pay for it.

        return dry_run.show(work, named, settings, environ, home, as_json=args.json, explain=args.verbose)
    attempts = None
    if named is None:
        from backplane.routing.driver import first_choice

        attempts = anyio.run(first_choice, work, settings, environ, home)
        named = backends.find(attempts.backend, settings, environ)
    with order.redacted(work.config.env):
        files = {option: ResultFile(getattr(args, option), stdout_taken=args.json) for option in written}
        live = follow.Live(
            args=args, order=work, hooks=own, backend=named, attempts=attempts, settings=settings, home=home,
            environ=environ, on_ask=on_ask, files=files,
        )  # fmt: skip
        return live.run()


def _named(args: Args, name: str | None, settings: Settings, environ: Mapping[str, str], home: Path) -> Backend | None:
    """Return the program of `--sidecar` or the backend of this name; None leaves the choice to the router."""
    if args.sidecar is not None:
        cwd = streams.folder()
        words = absolute_command(order.words_of(args.sidecar, "--sidecar"), cwd)  # It starts elsewhere.
        return backends.from_command(words, cwd=cwd, limits=settings.limits)
    if not name:
        return None
    if name.startswith(REPLAY):
        return replay.find_replay(name, home)
    named = backends.find(name, settings, environ)
    if (missing := readiness.missing_program(named, environ)) is not None:
        raise missing
    return named


def _conversation(args: Args, home: Path, backend: str | None) -> dict[str, Json]:
    """Return the members of `config.vendor.abp` that are about the conversation; `last` is one on this backend."""
    session: Json = {"keep": True} if args.keep else None
    if args.resume is not None:
        session = {"resume": _last(home, backend) if args.resume == LAST else args.resume}
    schema = args.schema and order.read_json(streams.read_input(args.schema), f"--schema {args.schema}")
    servers = [order.server(text) for text in args.mcp]
    tags = list(dict.fromkeys(args.tag))
    return {"session": session, "output_schema": schema, "mcp_servers": servers or None, "tags": tags or None}


def _last(home: Path, backend: str | None) -> str:
    """Return the id of the conversation that a run on this backend has kept last."""
    with Store.open(home) as store:
        for row in store.rows(RUNS_MAX):
            try:
                is_same = backend_name(store.folder(row.run_id)) == backend
                kept = store.load(row.run_id).backplane.get("session") if is_same else None
            except BackplaneError:  # It was pruned.
                continue
            if isinstance(kept, dict):
                return str(kept["id"])
    fact = f"no conversation with {backend or 'a command'} is stored on this machine"
    raise wrong(fact, 'store one first: backplane run --keep "…"')


def _on_ask(args: Args, cwd: Path, environ: Mapping[str, str]) -> str | tuple[str, ...]:
    """Return what answers the run's questions: one of `asking.WORDS`, or the words of a command."""
    how = asking.chosen_way(args.on_ask)
    if how in asking.WORDS:
        return how
    words = hooks.from_command("pre_tool", how, cwd).run
    assert isinstance(words, tuple)
    from backplane.runtime.faults import require_program  # Loads the prices of models.

    require_program(words[0], environ, f"give --on-ask one of {', '.join(asking.WORDS)}, or an installed program")
    return words
