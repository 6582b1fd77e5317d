"""Running one work order by the options of `run`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from backplane import config
from backplane.cli import asking, follow, order, streams
from backplane.cli.command import Args, wrong, wrong_words
from backplane.cli.result_file import ResultFile
from backplane.cli.run import LAST
from backplane.config import Settings, absolute_command
from backplane.contract.canonical import Json
from backplane.contract.work import REPLAY, WorkOrder, settings_of
from backplane.errors import BackplaneError
from backplane.receipts.store import Store
from backplane.runtime import backends, hooks, replay
from backplane.view.values import as_object

if TYPE_CHECKING:
    from backplane.routing.driver import Attempts
    from backplane.runtime.backends import Backend

RUNS_MAX: Final = 1000
"""Most runs that are read to find the last conversation, newest first: a row takes some 20 µs."""


def execute(args: Args) -> int:
    streams.require_descriptors()
    cwd, environ = streams.folder(), dict(os.environ)
    flags = {"run_s": args.timeout, "isolation": args.isolation, "warm_max": 0}  # No next order waits for a warm host.
    settings = config.load(args.config or None, environ, cwd, flags)
    on_ask = _on_ask(args, cwd, environ)
    asked = _router_asked(args)
    home = config.home(environ)
    work, own = order.build(args, environ, cwd, settings.policy), tuple[hooks.Hook, ...]()
    said = settings_of(work.config.vendor)
    if "hooks" in said:
        work, own = hooks.taken(work)
    name = args.backend or said.get("backend") or (None if asked else settings.default_backend)
    wanted = _conversation(args, home, name if args.sidecar is None else None)
    if asked:
        wanted["route"] = {**as_object(said.get("route")), **asked}
    if wanted:
        work = order.with_settings(work, wanted)
    if args.with_patch and not (args.sidecar is None and name and name.startswith(REPLAY)):
        raise wrong_words("--with-patch has no effect without replay:RUN", "use --backend replay:RUN --with-patch")
    if args.dry_run:
        return _dry_run(args, name, work, settings, environ, home)
    backend, attempts = _choose(args, name, work, settings, environ, home)
    with ExitStack() as opened, order.redacted(work.config.env):
        receipt, patch, run_id = (
            opened.enter_context(closing(ResultFile(file, stdout_taken=args.json))) if file is not None else None
            for file in (args.receipt, args.patch, args.run_id_file)
        )
        plan = follow.Plan(
            order=work,
            hooks=own,
            backend=backend,
            attempts=attempts,
            settings=settings,
            home=home,
            environ=environ,
            on_ask=on_ask,
            json=args.json,
            quiet=args.quiet,
            verbose=args.verbose,
            receipt=receipt,
            patch=patch,
            run_id=run_id,
        )
        return follow.run(plan)


def _choose(
    args: Args, name: str | None, work: WorkOrder, settings: Settings, environ: Mapping[str, str], home: Path
) -> tuple[Backend, Attempts | None]:
    """Return the backend: the program, the one of this name, or the router's choice with what may follow it.

    Raises:
        BackendError: `backend_not_found`, `backend_unavailable`.
        CapabilityError: `capability_unsupported`, no backend was named and none is eligible.
    """
    named = _named(args, name, settings, environ, home)
    if named is not None:
        return named, None
    from backplane.routing.driver import first_choice

    attempts = anyio.run(first_choice, work, settings, environ, home)
    return backends.find(attempts.backend, settings, environ), attempts


def _named(args: Args, name: str | None, settings: Settings, environ: Mapping[str, str], home: Path) -> Backend | None:
    if args.sidecar is not None:
        cwd = streams.folder()
        return backends.from_command(_sidecar_words(args.sidecar, cwd), cwd=cwd, limits=settings.limits)
    if not name:
        return None
    if name.startswith(REPLAY):
        return replay.find_replay(name, home, with_patch=args.with_patch)
    named = backends.find(name, settings, environ)
    missing = backends.missing_program(named, environ)
    if missing is not None:
        raise missing
    return named


def _dry_run(
    args: Args, name: str | None, work: WorkOrder, settings: Settings, environ: Mapping[str, str], home: Path
) -> int:
    from backplane.cli import dry_run  # Other runs do not pay for it.

    for option in ("receipt", "patch", "run_id_file"):
        if getattr(args, option) is not None:
            fact = f"--{option.replace('_', '-')} has no effect with --dry-run, which starts nothing"
            raise wrong_words(fact, "leave one of them out")
    named = _named(args, name, settings, environ, home)
    decision = dry_run.decide(work, settings, environ, home) if named is None else None
    backend = named.id if named is not None else None
    return dry_run.show(work, backend, decision, settings, as_json=args.json, explain=args.verbose)


def _router_asked(args: Args) -> dict[str, Json]:
    """Return what the options ask of the router.

    Raises:
        ConfigError: `usage_invalid`, a backend is named beside them.
    """
    asked = order.wishes(args)
    if asked and (args.backend is not None or args.sidecar is not None):
        names = {"preference": "--prefer", "max_cost_usd_micros": "--max-cost-usd"}
        fact = f"{names[next(iter(asked))]} has no effect with --backend, because the router is not used"
        raise wrong_words(fact, "leave out --backend or this option")
    return asked


def _conversation(args: Args, home: Path, backend: str | None) -> dict[str, Json]:
    """Return the members of `config.vendor.abp` that are about the conversation.

    Args:
        home: the state folder, in which `last` is looked up.
        backend: the name of the run's backend.

    Raises:
        ConfigError: `config_invalid`, a file or conversation is missing.
    """
    found: dict[str, Json] = {}
    if args.resume is not None:
        found["session"] = {"resume": _last(home, backend) if args.resume == LAST else args.resume}
    elif args.keep:
        found["session"] = {"keep": True}
    if args.schema is not None:
        found["output_schema"] = order.answer_schema(args.schema)
    if args.mcp:
        found["mcp_servers"] = [order.server(text) for text in args.mcp]
    if args.tag:
        found["tags"] = list(dict.fromkeys(args.tag))
    return found


def _last(home: Path, backend: str | None) -> str:
    """Return the id of the conversation that a run on this backend has kept last."""
    if backend is not None and home.is_dir():
        with Store.open(home) as store:
            for row in store.listed(RUNS_MAX):
                if row.backend_name != backend:
                    continue
                try:
                    kept = store.load(row.run_id).backplane.get("session")
                except BackplaneError:  # It was pruned.
                    continue
                if isinstance(kept, dict):
                    return str(kept["id"])
    fact = f"no conversation with {backend or 'a command'} is stored on this machine"
    raise wrong(fact, "store one first: `backplane run --keep` prints the id of the conversation")


def _on_ask(args: Args, cwd: Path, environ: Mapping[str, str]) -> str | tuple[str, ...]:
    """Return what answers the run's questions: one of `asking.WORDS`, or the words of a command."""
    how: str | None = args.on_ask
    if how is None:
        return "prompt" if streams.is_interactive() else "deny"
    if how == "stdin" and (not args.json or "-" in (args.task, args.order, args.schema)):
        fact = "--on-ask stdin needs --json, and nothing else may read stdin"
        raise wrong(fact, "add --json, and give the task and files without `-`; events with ext.ask are the questions")
    if how in asking.WORDS:
        return how
    from backplane.runtime.faults import require_program  # Most runs name no command.

    words = hooks.from_command("pre_tool", how, cwd).run
    assert isinstance(words, tuple)
    require_program(words[0], environ, f"correct --on-ask ({', '.join(asking.WORDS)}, or a command)")
    return words


def _sidecar_words(command: str, cwd: Path) -> tuple[str, ...]:
    """The words of `--sidecar`, with the paths that are relative to our folder made absolute: it starts elsewhere."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise wrong_words(f"--sidecar: cannot parse the command: {error}", "check its quotes") from error
    return absolute_command(words, cwd) if words else words
