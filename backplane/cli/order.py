"""Work orders from options and files; an option replaces the file's value."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.cli import streams
from backplane.cli.command import Args, scaled, wrong, wrong_words
from backplane.cli.options import mode_of
from backplane.contract import canonical, pictures
from backplane.contract.canonical import Json
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.conversation import Image
from backplane.contract.receipt import FINDINGS
from backplane.contract.unheard import read_work_order
from backplane.contract.work import PolicyProfile, Snippet, WorkOrder
from backplane.errors import BackplaneError
from backplane.policy.rules import with_defaults
from backplane.protocol import strict
from backplane.receipts.pieces import unheard_names
from backplane.redact.secrets import Redactor
from backplane.runtime.orders import make_order, without_effect

SNIPPET_BYTES_MAX: Final = 1024 * 1024
"""Largest context file from outside the workspace: it travels in the order, and a model reads far less."""

TURNS_MAX: Final = 2**32 - 1
"""Largest number of turns that the contract's field holds."""

_LEVELS: Final = ("native", "emulated", "any")
_replace: Final = msgspec.structs.replace


def build(
    args: Args,
    environ: Mapping[str, str],
    cwd: Path,
    policy: str | PolicyProfile | None,
    given: WorkOrder | None = None,
) -> WorkOrder:
    """Return the work order of a command.

    Args:
        policy: the configuration's policy, for an order that brings none.
        given: the order that the options change; None reads the one that they name.

    Raises:
        ConfigError: `usage_invalid` or `config_invalid`, an option or a file cannot be used.
        PolicyError: `policy_invalid`.
    """
    order = given or _read(args)
    _check_limits(args)
    env = {**order.config.env, **dict(_variable(text, environ) for text in args.env)}
    with redacted(env):
        made = make_order(
            _replace(order, config=_replace(order.config, env=env)),
            root=_root(args, order, cwd),
            model=args.model,
            policy=args.policy,
            lane=None if args.apply is None else "workspace_first" if args.apply else "patch_first",
            max_turns=args.max_turns,
            max_budget_usd=args.max_budget_usd,
            configured_policy=policy,
        )
        space = made.workspace
        mode = mode_of(args.in_place) or space.mode
        include, exclude = (*space.include, *args.include), (*space.exclude, *args.exclude)
        whole = _replace(
            made,
            workspace=_replace(space, mode=mode, include=include, exclude=exclude),
            policy=_with_tools(made.policy, args.allow_tool, args.deny_tool),
            requirements=Requirements((*made.requirements.required, *map(_requirement, args.require))),
        )
        for name in args.context:
            whole = _with_context(whole, name, cwd)
        for text in args.param:
            whole = _with_parameter(whole, text)
        return with_settings(whole, _settings(args, whole))


def with_settings(order: WorkOrder, settings: Mapping[str, Json]) -> WorkOrder:
    """Return an order with members of `config.vendor.abp`, by their names.

    Raises:
        ConfigError: `config_invalid`, another value than an object stands there.
    """
    if settings and not isinstance(order.config.vendor.get("abp", {}), dict):
        raise wrong("config.vendor already has a value at 'abp'", "make it an object, or leave it out of the order")
    for name, value in settings.items():
        order = order.with_abp(name, value)
    return order


def wishes(args: Args) -> dict[str, Json]:
    """Return the members of `config.vendor.abp.route` that options stand for.

    Raises:
        ConfigError: `usage_invalid`, the amount is none.
    """
    said: dict[str, Json] = {"preference": args.prefer}
    if args.max_cost_usd is not None:
        if not 0 <= args.max_cost_usd < 1e9:
            raise wrong_words(f"--max-cost-usd {args.max_cost_usd} is not an amount", "give dollars, as 0.50")
        said["max_cost_usd_micros"] = scaled(args.max_cost_usd, 1_000_000, "--max-cost-usd")
    return {name: value for name, value in said.items() if value is not None}


def say_without_effect(order: WorkOrder) -> None:
    """Print on stderr the warnings that the order's run would have."""
    for _, _, fact in without_effect(order, unheard_names(order.config.vendor)):
        streams.note(fact)


@contextmanager
def redacted(env: Mapping[str, str]) -> Iterator[None]:
    """Remove the values of these variables from errors that leave the block: a file's name may hold one."""
    try:
        yield
    except BackplaneError as error:
        Redactor(env.values()).error(error)
        raise


# The order itself -----------------------------------------------------------------------------------------------------


def _read(args: Args) -> WorkOrder:
    if args.task is None and args.order is None:
        raise wrong_words("no task is given", 'give one: backplane run "…", or --order FILE')
    if args.task is not None and args.order is not None:
        raise wrong_words("TASK and --order FILE are both given", "leave one out")
    if args.order is not None:
        return read_order(streams.read_input(args.order), streams.source(args.order), lenient=args.lenient)
    try:
        task = streams.read_input("-").decode() if args.task == "-" else args.task
        task.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise wrong_words("the task is not UTF-8 text", "encode it as UTF-8") from error
    if not task.strip():
        raise wrong_words("the task is empty", "describe in words what the agent should do")
    return _shaped({"task": task}, "the task")


def read_order(data: bytes, source: str, *, lenient: bool = False) -> WorkOrder:
    """Read a work order; only `task` is required.

    Raises:
        ConfigError: `config_invalid`; a key that stands twice, too.
    """
    try:
        value = strict(data)
        doubled = canonical.duplicate_key(data, value)
    except (ValueError, RecursionError) as error:
        raise wrong(f"{source} is not strict JSON: {error}", "correct the JSON at that place") from error
    if doubled is not None:
        raise wrong(f"{source}: the key {doubled!r} appears twice in one object", "remove one of the two")
    return _shaped(value, source, lenient=lenient)


def _shaped(value: Json, source: str, *, lenient: bool = False) -> WorkOrder:
    try:
        # Words of a command line that are no text (lone surrogates) are found by writing them.
        canonical.encode(value)
        return read_work_order(value, lenient=lenient)
    except ValueError as error:
        raise wrong(f"{source} is not a work order: {error}", "see `backplane schema work_order`") from error


def _check_limits(args: Args) -> None:
    budget, turns = args.max_budget_usd, args.max_turns
    if args.model is not None and not args.model.strip():
        raise wrong_words("--model is empty", "name a model, or leave the option out to use the backend's default")
    if budget is not None and not 0 <= budget < float("inf"):
        raise wrong_words(f"--max-budget-usd {budget} is not an amount", "give dollars, as 0.50")
    if turns is not None and not 0 <= turns <= TURNS_MAX:
        raise wrong_words(f"--max-turns {turns} is out of range", f"give a number from 0 to {TURNS_MAX}")


def _root(args: Args, order: WorkOrder, cwd: Path) -> str:
    root = os.path.normpath(cwd / (args.root if args.root is not None else order.workspace.root))
    try:
        root.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(root).decode("utf-8", "backslashreplace")
        fact = f"the name of the workspace '{shown}' is not UTF-8, and an order is UTF-8 text"
        raise wrong(fact, "rename the folder, or give a symbolic link to it as --root") from error
    return root


def _with_tools(profile: PolicyProfile, allowed: list[str], denied: list[str]) -> PolicyProfile:
    if not allowed and not denied:
        return profile
    profile = with_defaults(profile)  # A rule is added to what would count without it.
    return _replace(
        profile,
        allowed_tools=(*profile.allowed_tools, *allowed),
        disallowed_tools=(*profile.disallowed_tools, *denied),
    )


def _with_context(order: WorkOrder, name: str, cwd: Path) -> WorkOrder:
    """Name a file of the workspace by its path there, and take along the content of any other."""
    packet, root = order.context, Path(order.workspace.root)
    path = Path(os.path.normpath(cwd / name))
    if path.is_relative_to(root) and os.path.exists(path):
        packet = _replace(packet, files=(*packet.files, path.relative_to(root).as_posix()))
    else:
        packet = _replace(packet, snippets=(*packet.snippets, Snippet(name, _text(name))))
    return _replace(order, context=packet)


def _text(name: str) -> str:
    data = streams.read_input(name)
    if len(data) > SNIPPET_BYTES_MAX:
        raise wrong(f"the context file {name!r} is over {SNIPPET_BYTES_MAX} bytes", "put the file into the workspace")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise wrong(f"the context file {name!r} is not UTF-8 text", "put the file into the workspace") from error


def _requirement(text: str) -> Requirement:
    name, equals, level = text.partition("=")
    if equals and level not in _LEVELS:
        raise wrong_words(f"--require {text!r}: unknown level", f"choose one of: {', '.join(_LEVELS)}")
    return Requirement(name, level if equals else "emulated")  # type: ignore[arg-type]  # one of `_LEVELS`


def _variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Read `K=V`, or `K` with our own value. Errors name the variable, never its value."""
    name, equals, value = text.partition("=")
    if not name or "\0" in text:
        raise wrong_words("--env has no name before the =", "give --env NAME=VALUE, or --env NAME")
    if not equals and name not in environ:
        raise wrong_words(f"--env {name!r}: this variable is not set here", f"set it, or give --env {name}=VALUE")
    return name, value if equals else environ[name]


def _with_parameter(order: WorkOrder, text: str) -> WorkOrder:
    key, equals, value = text.partition("=")
    keys = key.split(".")
    if not equals or not all(keys):
        raise wrong_words(f"--param {text!r} is not of the form KEY=JSON", "for example --param abp.route.seed=7")
    try:
        read = strict(value.encode())
    except (ValueError, RecursionError):
        read = value  # A plain word stands for itself.
    return _replace(order, config=_replace(order.config, vendor=_nested(order.config.vendor, keys, read, text)))


def _nested(vendor: dict[str, Any], keys: list[str], value: Json, option: str) -> dict[str, Any]:
    first, *rest = keys
    if not rest:
        return {**vendor, first: value}
    inner = vendor.get(first, {})
    if not isinstance(inner, dict):
        raise wrong_words(f"{option}: config.vendor already has a value at {first!r}", "set each key only once")
    return {**vendor, first: _nested(inner, rest, value, option)}


# Settings of ours -----------------------------------------------------------------------------------------------------


def _settings(args: Args, order: WorkOrder) -> dict[str, Json]:
    """Return the members of `config.vendor.abp` that options stand for."""
    shown = [*(order.abp("images") or ()), *msgspec.to_builtins(images(args.image))] if args.image else None
    found: dict[str, Any] = {
        "images": shown,
        "isolation": args.isolation,
        "fail_on": _fail_on(args.fail_on) if args.fail_on else None,
        "lenient": args.lenient or None,
        "pure": args.pure or None,
        "checkpoints": "auto" if args.checkpoints else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def images(names: Sequence[str]) -> tuple[Image, ...]:
    """Read pictures from files, `-` is stdin.

    Raises:
        ConfigError: `config_invalid`, one cannot be read or is none that a model takes, or they are too large.
    """
    bound = pictures.IMAGE_BYTES_MAX
    return pictures.checked(
        [pictures.image_from(streams.read_input(name, bound), streams.source(name)) for name in names]
    )


def _fail_on(given: Sequence[str]) -> list[Json]:
    """Read the words of `--fail-on`: lists of findings, or `none`."""
    words = [word.strip() for text in given for word in text.split(",")]
    if words == ["none"]:
        return []
    if unknown := [word for word in words if word not in FINDINGS]:
        hint = f"give one or more of {', '.join(FINDINGS)}; or none alone"
        raise wrong_words(f"--fail-on {unknown[0]!r} is not a finding", hint)
    return list(dict.fromkeys(words))


def server(text: str) -> Json:
    """Read an MCP server, `NAME=COMMAND` or `NAME=URL`."""
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise wrong_words(
            f"--mcp {text!r} is not of the form NAME=COMMAND or NAME=URL", 'for example --mcp git="uvx mcp-server-git"'
        )
    if value.startswith(("http://", "https://")):
        return {"name": name, "url": value}
    try:
        command, *arguments = shlex.split(value)
    except ValueError as error:
        raise wrong_words(f"--mcp {name}: cannot parse the command: {error}", "check its quotes") from error
    made: dict[str, Any] = {"name": name, "command": command}
    return {**made, "args": arguments} if arguments else made


def answer_schema(path: str) -> Json:
    """Read the JSON Schema that an answer has to satisfy."""
    try:
        schema = strict(streams.read_input(path))
    except (ValueError, RecursionError) as error:
        raise wrong(f"--schema {path}: not strict JSON ({error})", "give a JSON Schema") from error
    if not isinstance(schema, dict):
        raise wrong(f"--schema {path}: not a JSON object", "give a JSON Schema")
    return schema
