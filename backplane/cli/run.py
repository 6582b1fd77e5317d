"""`run`: the options of one work order. What they mean is in `order`, what happens then in `live`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config, add_json, add_plain, add_requirements, add_task, seconds
from backplane.cli.route import add_wishes, wishes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from backplane.config import Settings
    from backplane.contract.canonical import Json
    from backplane.contract.work import WorkOrder
    from backplane.routing.driver import Attempts
    from backplane.runtime.backends import Backend

EXAMPLE = """
backplane run "make test" --backend shell --root ~/project
backplane run --order order.json --sidecar 'node my-host.mjs' --json > events.jsonl
"""


def parser(name: str) -> Parser:
    """The options of `run`."""
    made = Parser(f"backplane {name}", "Run one work order, from start to receipt.", EXAMPLE, _run)
    made.usage = "backplane run [options] (TASK | --order FILE)"
    add_task(made, or_order=True)
    add_config(made)
    where = made.add_argument_group("who does it")
    one = where.add_mutually_exclusive_group()
    one.add_argument("-b", "--backend", metavar="NAME", help="a backend (see `backplane backends`), or `replay:RUN`")
    one.add_argument("--sidecar", metavar="COMMAND", help="any program that speaks the protocol")
    routed = made.add_argument_group("where no backend is named, the router chooses one (`backplane route`)")
    add_wishes(routed)
    where.add_argument(
        "--pure", action="store_true", help="the same order on the same tree may be served from the store"
    )
    where.add_argument("--with-patch", action="store_true", help="with the backend `replay:RUN`: its patch, too")
    add_requirements(where, "the model it should use")
    _add_conversation(made)
    _add_workspace(made)
    _add_permissions(made)
    _add_limits(made)
    output = made.add_argument_group("output")
    output.add_argument(
        "--tag", metavar="TAG", action="append", default=[], help="find it again by it: a word, or KEY=VALUE"
    )
    output.add_argument(
        "--hash-task",
        action="store_true",
        help="keep the order with a hash of its task; events may repeat its text, those of `shell` always do",
    )
    output.add_argument("--log-file", metavar="FILE", help="add a line of JSON there for each event, without its texts")
    much = output.add_mutually_exclusive_group()
    much.add_argument("-v", "--verbose", action="store_true", help="say on stderr where it runs and what was decided")
    much.add_argument("-q", "--quiet", action="store_true", help="print the answer alone")
    add_plain(output)
    add_json(output, "the protocol's own messages, one a line", "envelope_event", "envelope_final", "envelope_fatal")
    output.add_argument("--dry-run", action="store_true", help="show the order and who would get it; start nothing")
    output.add_argument("--receipt", metavar="FILE", help="write the receipt there, too; - for stdout")
    output.add_argument("--patch", metavar="FILE", help="write the patch there, too; - for stdout")
    output.add_argument("--sign-key", metavar="FILE", help="sign the receipt with this Ed25519 key")
    return made


def _add_conversation(made: Parser) -> None:
    add = made.add_argument_group("the conversation").add_argument
    add("--keep", action="store_true", help="keep it; its id is shown")
    add("--resume", metavar="ID", help="go on with a kept one; `last` is this backend's last")
    add("--fork", metavar="ID", help="go on with a copy of it")
    add("--schema", metavar="FILE", help="JSON Schema that the answer has to satisfy; - for stdin")
    add(
        "--mcp",
        metavar="NAME=COMMAND",
        action="append",
        default=[],
        help="an MCP server for it; NAME=URL for a far one",
    )


def _add_workspace(made: Parser) -> None:
    add = made.add_argument_group("the workspace").add_argument
    add("--root", metavar="DIR", help="folder to work on (.)")
    add("--mode", choices=("staged", "pass_through"), help="in a copy, or in place (staged)")
    add(
        "--lane",
        choices=("patch_first", "workspace_first"),
        help="leave the result as a patch, or apply it when complete (patch_first)",
    )
    add("--include", metavar="GLOB", action="append", default=[], help="only these files")
    add("--exclude", metavar="GLOB", action="append", default=[], help="not these files")
    add("--context", metavar="FILE", action="append", default=[], help="a file it should look at")
    add("--image", metavar="FILE", action="append", default=[], help="a picture it is shown: PNG, JPEG, GIF or WebP")
    add("--checkpoints", action="store_true", help="keep its state before each tool that may write")


def _add_permissions(made: Parser) -> None:
    add = made.add_argument_group("what it may do").add_argument
    add("--policy", metavar="FILE", help="policy as JSON, or `default`, `strict` or `ci`, which are shipped")
    add("--allow-tool", metavar="T", action="append", default=[], help="only these tools")
    add("--deny-tool", metavar="T", action="append", default=[], help="not these tools")
    add("--lenient", action="store_true", help="take a stranger's order though some of its members are unknown")
    add("--isolation", choices=("required", "best_effort", "off"), help="keep it inside its workspace (best_effort)")
    add(
        "--on-ask",
        metavar="HOW",
        help="its questions: deny, allow, prompt (on a terminal), wait (for `backplane answer` or `watch`), stdin "
        "(`answer` lines, with --json), or a command that reads one as JSON and prints its decision; deny where there "
        "is no terminal",
    )
    add(
        "--pre-tool",
        metavar="CMD",
        action="append",
        default=[],
        help="a hook: asked before each tool, may deny or change",
    )
    add(
        "--post-tool",
        metavar="CMD",
        action="append",
        default=[],
        help="a hook: asked after each tool, may hide or change",
    )
    add("--param", metavar="KEY=JSON", action="append", default=[], help="a vendor's setting; a.b=1 nests")
    add("--env", metavar="K[=V]", action="append", default=[], help="a variable for it; K alone takes ours")
    add("--env-file", metavar="FILE", help="variables for it, K=V a line")


def _add_limits(made: Parser) -> None:
    add = made.add_argument_group("limits").add_argument
    add("--max-turns", metavar="N", type=int, help="turns of the model")
    add("--max-budget-usd", metavar="X", type=float, help="money, as far as the backend counts it")
    add("--timeout", metavar="TIME", type=seconds, help="for the whole run, as 90, 90s, 5m, 2h (none)")
    add("--idle-timeout", metavar="TIME", type=seconds, help="without a sign of life (300s)")
    add("--hello-timeout", metavar="TIME", type=seconds, help="until its hello (10s)")


def _run(options: Options) -> int:
    import os
    from contextlib import ExitStack, closing
    from pathlib import Path

    from backplane import config
    from backplane.cli import live, order, session
    from backplane.cli.copies import Copy
    from backplane.cli.log import RunLog
    from backplane.contract.work import REPLAY
    from backplane.errors import ConfigError
    from backplane.runtime import hooks

    streams.require_descriptors()
    cwd, environ = streams.folder(), dict(os.environ)
    flags = {
        "run_s": options.timeout,
        "idle_s": options.idle_timeout,
        "hello_s": options.hello_timeout,
        "isolation": options.isolation,
        "signing_key": options.sign_key,
    }
    settings = config.load(Path(options.config) if options.config else None, environ, cwd, flags)
    on_ask = _on_ask(options, cwd, environ)
    asked = _router_asked(options)
    home = config.home(environ)
    work, own = hooks.taken(order.build(options, environ, cwd, settings.policy))
    name = options.backend or work.abp("backend") or (None if asked else settings.default_backend)
    wanted = session.settings(options, home, name if options.sidecar is None else None)
    if asked:
        wanted["route"] = {**_object(work.abp("route")), **asked}
    work = order.with_settings(work, wanted)
    if options.with_patch and not (options.sidecar is None and name and name.startswith(REPLAY)):
        fact = "--with-patch is for the replay of a stored run"
        raise ConfigError("config_invalid", fact, hint="--backend replay:RUN --with-patch")
    typed = [hooks.from_command("pre_tool", command, cwd) for command in options.pre_tool]
    typed += [hooks.from_command("post_tool", command, cwd) for command in options.post_tool]
    for hook in typed:
        if isinstance(hook.run, tuple):
            _require_program(hook.run[0], environ, f"correct --{hook.event.replace('_', '-')}")
    backend, attempts = _choose(options, name, work, settings, environ, home)
    if options.dry_run:
        return _show(work, attempts.backend if attempts is not None else backend.id, settings, as_json=options.json)
    with ExitStack() as opened, order.told_without(work.config.env):
        receipt, patch = (
            opened.enter_context(closing(Copy(file, stdout_taken=options.json))) if file is not None else None
            for file in (options.receipt, options.patch)
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
            log=opened.enter_context(RunLog(options.log_file)) if options.log_file is not None else None,
            receipt=receipt,
            patch=patch,
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
    from backplane.contract.work import REPLAY
    from backplane.runtime import backends, replay

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


def _show(work: WorkOrder, backend: str, settings: Settings, *, as_json: bool) -> int:
    """Print the order as it would be sent, the values of its variables left out, and who would get it.

    Raises:
        PolicyError: `policy_invalid`, the policy cannot be read.
        ConfigError: `config_invalid`, the order is none that a host would take.
        WorkspaceError: `workspace_init_failed`, its folder is not there.
    """
    from pathlib import Path

    import msgspec

    from backplane.cli import order
    from backplane.contract.unheard import check_settings
    from backplane.policy.rules import compile_policy
    from backplane.runtime.orders import check_order
    from backplane.workspace.workspace import find_original

    check_order(work)
    check_settings(work)
    compile_policy(work.policy)
    order.say_without_effect(work)
    if work.abp("remote_root") is None:
        find_original(Path(work.workspace.root))
    shown = msgspec.structs.replace(work, config=msgspec.structs.replace(work.config, env={}))
    if as_json:
        streams.write_json(msgspec.json.encode(shown) + b"\n")
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
        ConfigError: `config_invalid`, they do so beside a backend that is named.
    """
    from backplane.errors import ConfigError

    asked = wishes(options)
    if asked and (options.backend is not None or options.sidecar is not None):
        fact = f"{', '.join(asked)}: the router is told so, and it is not asked where a backend is named"
        raise ConfigError("config_invalid", fact, hint="leave out --backend, or these")
    return asked


def _object(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _on_ask(options: Options, cwd: Path, environ: Mapping[str, str]) -> str | tuple[str, ...]:
    """What answers the run's questions: one of `asking.WORDS`, or the words of a command."""
    from backplane.cli import asking
    from backplane.errors import ConfigError
    from backplane.runtime import hooks

    how: str | None = options.on_ask
    if how is None:
        return "prompt" if streams.is_interactive() else "deny"
    if how == "stdin" and (not options.json or "-" in (options.order, options.schema, options.env_file)):
        fact = "--on-ask stdin needs --json, and stdin for nothing else"
        raise ConfigError("config_invalid", fact, hint="the questions are the events with ext.ask")
    if how in asking.WORDS:
        return how
    words = hooks.from_command("pre_tool", how, cwd).run
    assert isinstance(words, tuple)
    _require_program(words[0], environ, f"correct --on-ask ({', '.join(asking.WORDS)}, or a command)")
    return words


def _require_program(program: str, environ: Mapping[str, str], hint: str) -> None:
    """Refuse a program that is not there: the run would deny every tool, and say so again and again."""
    import shutil

    from backplane.errors import ConfigError

    if shutil.which(program, path=environ.get("PATH")) is None:
        raise ConfigError("config_invalid", f"the program {program!r} is not found or not executable", hint=hint)


def _sidecar_words(command: str, cwd: Path) -> tuple[str, ...]:
    """The words of `--sidecar`, with the paths that are relative to our folder made absolute: it starts elsewhere."""
    import shlex

    from backplane.config import absolute_command
    from backplane.errors import ConfigError

    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError("config_invalid", f"--sidecar cannot be read: {error}", hint="check its quotes") from error
    return absolute_command(words, cwd) if words else words
