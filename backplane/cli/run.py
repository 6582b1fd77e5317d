"""`run`: the options of one work order. What they mean is in `order`, what happens then in `live`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane import config
from backplane.cli import asking, live, order, streams
from backplane.cli.parser import Options
from backplane.cli.result_file import ResultFile
from backplane.cli.start import wrong, wrong_words
from backplane.config import Settings, absolute_command
from backplane.contract.canonical import Json
from backplane.contract.work import REPLAY, WorkOrder, settings_of
from backplane.errors import BackplaneError
from backplane.protocol import strict
from backplane.receipts.store import Store
from backplane.runtime import backends, hooks, replay
from backplane.view.values import as_object

if TYPE_CHECKING:
    from backplane.routing.driver import Attempts
    from backplane.runtime.backends import Backend


LAST: Final = "last"

RUNS_MAX: Final = 1000
"""Runs that are looked through for the last conversation, newest first: a row takes some 20 µs."""


def run(options: Options) -> int:
    streams.require_descriptors()
    cwd, environ = streams.folder(), dict(os.environ)
    flags = {
        "run_s": options.timeout,
        "idle_s": options.idle_timeout,
        "hello_s": options.hello_timeout,
        "isolation": options.isolation,
        "signing_key": options.sign_key,
        "warm_max": 0,  # There is no next order for a host to wait for.
    }
    settings = config.load(options.config or None, environ, cwd, flags)
    on_ask = _on_ask(options, cwd, environ)
    asked = _router_asked(options)
    home = config.home(environ)
    work, own = order.build(options, environ, cwd, settings.policy), tuple[hooks.Hook, ...]()
    said = settings_of(work.config.vendor)
    if "hooks" in said:
        work, own = hooks.taken(work)
    name = options.backend or said.get("backend") or (None if asked else settings.default_backend)
    wanted = _conversation(options, home, name if options.sidecar is None else None)
    if asked:
        wanted["route"] = {**as_object(said.get("route")), **asked}
    if wanted:
        work = order.with_settings(work, wanted)
    if options.with_patch and not (options.sidecar is None and name and name.startswith(REPLAY)):
        raise wrong_words("--with-patch is for the replay of a stored run", "--backend replay:RUN --with-patch")
    typed = [hooks.from_command("pre_tool", command, cwd) for command in options.pre_tool]
    typed += [hooks.from_command("post_tool", command, cwd) for command in options.post_tool]
    for hook in typed:
        if isinstance(hook.run, tuple):
            _require_program(hook.run[0], environ, f"correct --{hook.event.replace('_', '-')}")
    if options.dry_run:
        _require_no_files(options)
    backend, attempts = _choose(options, name, work, settings, environ, home)
    if options.dry_run:
        return _show(work, attempts.backend if attempts is not None else backend.id, settings, as_json=options.json)
    with ExitStack() as opened, order.told_without(work.config.env):
        receipt, patch, run_id = (
            opened.enter_context(closing(ResultFile(file, stdout_taken=options.json))) if file is not None else None
            for file in (options.receipt, options.patch, options.run_id_file)
        )
        plan = live.Plan(
            order=work,
            hooks=(*own, *typed),
            backend=backend,
            attempts=attempts,
            settings=settings,
            home=home,
            environ=environ,
            on_ask=on_ask,
            json=options.json,
            plain=options.plain,
            quiet=options.quiet,
            verbose=options.verbose,
            receipt=receipt,
            patch=patch,
            run_id=run_id,
        )
        return live.run(plan)


def _choose(
    options: Options,
    name: str | None,
    work: WorkOrder,
    settings: Settings,
    environ: Mapping[str, str],
    home: Path,
) -> tuple[Backend, Attempts | None]:
    """Find who does it: a program, the backend of this name, or the router's choice with what may follow it.

    Raises:
        BackendError: `backend_not_found`, `backend_unavailable`.
        CapabilityError: `capability_unsupported`, no backend was named and none is eligible.
    """
    if options.sidecar is not None:
        cwd = streams.folder()
        return backends.from_command(_sidecar_words(options.sidecar, cwd), cwd=cwd, limits=settings.limits), None
    if name and name.startswith(REPLAY):
        return replay.find_replay(name, home, with_patch=options.with_patch), None
    if name:
        named = backends.find(name, settings, environ)
        missing = backends.missing_program(named, environ)
        if missing is not None:
            raise missing
        return named, None
    import anyio

    from backplane.routing.driver import first_choice

    attempts = anyio.run(first_choice, work, settings, environ, home)
    return backends.find(attempts.backend, settings, environ), attempts


def _require_no_files(options: Options) -> None:
    """Refuse what a run alone would write; raises ConfigError `usage_invalid`."""
    for name in ("receipt", "patch", "run_id_file"):
        if getattr(options, name) is not None:
            fact = f"--{name.replace('_', '-')} has no effect with --dry-run, which starts nothing"
            raise wrong_words(fact, "leave one of them out")


def _show(work: WorkOrder, backend: str, settings: Settings, *, as_json: bool) -> int:
    """Print the order as it would be sent, the values of its variables left out, and who would get it.

    Raises:
        PolicyError: `policy_invalid`, the policy cannot be read.
        ConfigError: `config_invalid`, the order is none that a host would take.
        WorkspaceError: `workspace_init_failed`, its folder is not there.
    """
    from backplane.runtime.faults import check_whole  # Most runs look at no more than themselves.
    from backplane.runtime.plane import signer_of

    check_whole(work)
    signer_of(settings.signing_key)
    order.say_without_effect(work)
    if work.abp("remote_root") is None:
        from backplane.workspace.workspace import find_original

        find_original(Path(work.workspace.root))
    shown = msgspec.structs.replace(work, config=msgspec.structs.replace(work.config, env={}))
    if as_json:
        streams.write_record(shown)
        return 0
    rules = {name: value for name, value in msgspec.to_builtins(work.policy).items() if value}
    limits = settings.limits_of(backend)
    rows = {
        "backend": backend,
        "task": work.task,
        "root": f"{work.workspace.root} ({work.workspace.mode}, {work.lane})",
        "model": work.config.model or "its own",
        "policy": ", ".join(f"{name}: {' '.join(value)}" for name, value in rules.items()) or "the default profile",
        "isolation": work.abp("isolation") or settings.isolation,
        "requires": ", ".join(f"{one.capability}={one.min_support}" for one in work.requirements.required) or "nothing",
        "variables": ", ".join(sorted(work.config.env)) or "none beside the usual ones",
        "ends": f"after {limits.idle_s:g} s of silence" + (f", {limits.run_s:g} s in all" if limits.run_s else ""),
    }
    streams.write("".join(f"{name:<10}{streams.one_line(value)}\n" for name, value in rows.items()))
    streams.write("nothing was started\n")
    return 0


def _router_asked(options: Options) -> dict[str, Json]:
    """What the options say to the router.

    Raises:
        ConfigError: `usage_invalid`, they do so beside a backend that is named.
    """
    asked = order.wishes(options)
    if asked and (options.backend is not None or options.sidecar is not None):
        fact = f"{', '.join(asked)}: the router is told so, and it is not asked where a backend is named"
        raise wrong_words(fact, "leave out --backend, or these")
    return asked


def _conversation(options: Options, home: Path, backend: str | None) -> dict[str, Json]:
    """Return the members of `config.vendor.abp` that options stand for: the conversation, and what agents heed of it.

    Args:
        home: the state folder, in which `last` is looked up.
        backend: the name of the backend that the run is on; `last` is its last conversation.

    Raises:
        ConfigError: `usage_invalid`, two options exclude each other; `config_invalid`, a file or conversation
            is not there.
    """
    found: dict[str, Json] = {}
    session = _session(options, home, backend)
    if session:
        found["session"] = session
    if options.schema is not None:
        found["output_schema"] = _schema(options.schema)
    if options.mcp:
        found["mcp_servers"] = [_server(text) for text in options.mcp]
    if options.tag:
        found["tags"] = list(dict.fromkeys(options.tag))
    if options.hash_task:
        found["task_text"] = "hash"
    return found


def _session(options: Options, home: Path, backend: str | None) -> dict[str, Json]:
    given = [(name, value) for name, value in (("resume", options.resume), ("fork", options.fork)) if value is not None]
    if len(given) > 1:
        raise wrong_words("--resume and --fork exclude each other", "--fork ID leaves it as it is")
    if not given:
        return {"keep": True} if options.keep else {}
    ((name, wanted),) = given
    return {name: _last(home, backend) if wanted == LAST else wanted}


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
    fact = f"no conversation with {backend or 'a command'} is kept here"
    raise wrong(fact, "run with --keep first; its output names the conversation")


def _schema(path: str) -> Json:
    try:
        schema = strict(streams.read_input(path))
    except (ValueError, RecursionError) as error:
        raise wrong(f"--schema {path}: not strict JSON ({error})") from error
    if not isinstance(schema, dict):
        raise wrong(f"--schema {path}: not a JSON object", "give a JSON Schema")
    return schema


def _server(text: str) -> Json:
    """Read `NAME=COMMAND` or `NAME=URL`."""
    name, equals, value = text.partition("=")
    form = wrong_words(f"--mcp {text!r} is not of the form NAME=COMMAND or NAME=URL")
    if not (name.strip() and equals and value.strip()):
        raise form
    if value.startswith(("http://", "https://")):
        return {"name": name, "url": value}
    try:
        command, *arguments = shlex.split(value)
    except ValueError as error:
        raise wrong_words(f"--mcp {name}: the command cannot be read: {error}") from error
    made: dict[str, Any] = {"name": name, "command": command}
    return {**made, "args": arguments} if arguments else made


def _on_ask(options: Options, cwd: Path, environ: Mapping[str, str]) -> str | tuple[str, ...]:
    """What answers the run's questions: one of `asking.WORDS`, or the words of a command."""
    how: str | None = options.on_ask
    if how is None:
        return "prompt" if streams.is_interactive() else "deny"
    if how == "stdin" and (not options.json or "-" in (options.order, options.schema, options.env_file)):
        fact = "--on-ask stdin needs --json, and stdin for nothing else"
        raise wrong(fact, "the questions are the events with ext.ask")
    if how in asking.WORDS:
        return how
    words = hooks.from_command("pre_tool", how, cwd).run
    assert isinstance(words, tuple)
    _require_program(words[0], environ, f"correct --on-ask ({', '.join(asking.WORDS)}, or a command)")
    return words


def _require_program(program: str, environ: Mapping[str, str], hint: str) -> None:
    from backplane.runtime.faults import require_program

    require_program(program, environ, hint)


def _sidecar_words(command: str, cwd: Path) -> tuple[str, ...]:
    """The words of `--sidecar`, with the paths that are relative to our folder made absolute: it starts elsewhere."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise wrong_words(f"--sidecar cannot be read: {error}", "check its quotes") from error
    return absolute_command(words, cwd) if words else words
