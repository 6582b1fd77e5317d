"""From options and files to a work order; the options go over what a file says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backplane.cli import streams
from backplane.cli.command import Args, scaled, wrong, wrong_words
from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.receipt import FINDINGS
from backplane.contract.unheard import read_work_order
from backplane.contract.work import ContextPacket, PolicyProfile, RuntimeConfig, Snippet, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.policy.rules import with_defaults
from backplane.protocol import strict
from backplane.runtime.orders import read_policy

if TYPE_CHECKING:
    from backplane.contract.conversation import Image

SNIPPET_BYTES_MAX: Final = 1024 * 1024
"""Largest context file from outside the workspace: it travels in the order, and a model reads far less."""

TURNS_MAX: Final = 2**32 - 1
"""What the contract's field holds."""

_LEVELS: Final = ("native", "emulated", "any")
_replace: Final = msgspec.structs.replace


def build(
    args: Args,
    environ: Mapping[str, str],
    cwd: Path,
    policy: str | PolicyProfile | None,
    given: WorkOrder | None = None,
) -> WorkOrder:
    """Make the work order of a `run`.

    Args:
        given: the order that the options change; None reads the one that they name.
        policy: the configuration's policy, for an order that brings none.

    Raises:
        ConfigError: `usage_invalid` or `config_invalid`, an option or a file cannot be used.
        PolicyError: `policy_invalid`.
    """
    order = given or _start(args)
    env = {**order.config.env, **_variables(args, environ)}
    with told_without(env):
        workspace = _workspace(order.workspace, args, cwd)
        return _replace(
            order,
            lane="workspace_first" if args.apply else order.lane,
            workspace=workspace,
            context=_context(order.context, args.context, Path(workspace.root), cwd),
            policy=_policy(order.policy, args, cwd, policy),
            requirements=Requirements((*order.requirements.required, *map(requirement, args.require))),
            config=_replace(_config(order.config, args), env=env),
        )


def with_settings(order: WorkOrder, settings: Mapping[str, Json]) -> WorkOrder:
    """Return an order with settings of ours that options stand for, by their name below `config.vendor.abp`.

    Raises:
        ConfigError: `config_invalid`, what stands there is no object, and would be lost.
    """
    if settings and not isinstance(order.config.vendor.get("abp", {}), dict):
        raise wrong("config.vendor already has a value at 'abp'")
    for name, value in settings.items():
        order = order.with_abp(name, value)
    return order


def wishes(args: Args) -> dict[str, Json]:
    """Return the members of `config.vendor.abp.route` that options stand for.

    Raises:
        ConfigError: `usage_invalid`, the amount is none.
    """
    cost = _scaled(args.max_cost_usd, 1_000_000, "--max-cost-usd")
    said: dict[str, Json] = {"preference": args.prefer, "max_cost_usd_micros": cost}
    return {name: value for name, value in said.items() if value is not None}


def _scaled(value: float | None, scale: int, option: str) -> int | None:
    if value is None:
        return None
    if not 0 <= value < 1e9:
        raise wrong_words(f"{option} {value} is no amount", "give a number from 0 on")
    return scaled(value, scale, option)


def say_without_effect(order: WorkOrder) -> None:
    """Say on stderr what its run will warn of, where that is not here or not now."""
    from backplane.receipts.pieces import unheard_names
    from backplane.runtime.orders import without_effect

    for _, _, fact in without_effect(order, unheard_names(order.config.vendor)):
        streams.note(fact)


@contextmanager
def told_without(env: Mapping[str, str]) -> Iterator[None]:
    """Let errors out with no value of these variables in them: a name may hold one."""
    try:
        yield
    except BackplaneError as error:
        from backplane.redact.secrets import Redactor

        Redactor(env.values()).error(error)
        raise


def _start(args: Args) -> WorkOrder:
    if args.task is None and args.order is None:
        raise wrong_words("no task is given", 'backplane run "…", or --order FILE')
    if args.task is not None and args.order is not None:
        raise wrong_words("TASK and --order FILE are both given", "leave one out")
    if args.order is not None:
        return read_order(streams.read_input(args.order), streams.source(args.order), lenient=args.lenient)
    try:
        task = streams.read_input("-").decode() if args.task == "-" else args.task
        task.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise wrong_words("the task is no UTF-8 text", "write it in UTF-8") from error
    if not task.strip():
        raise wrong_words("the task is empty", "say in words what to do")
    return _shaped({"task": task}, "the task")


def read_order(data: bytes, source: str, *, lenient: bool = False) -> WorkOrder:
    """Read a work order at our own door: only `task` is required, a key may not stand twice.

    Raises:
        ConfigError: `config_invalid`.
    """
    try:
        value = strict(data)
        doubled = canonical.duplicate_key(data, value)
    except (ValueError, RecursionError) as error:
        raise wrong(f"{source} is not strict JSON: {error}") from error
    if doubled is not None:
        raise wrong(f"{source}: the key {doubled!r} stands twice in one object")
    return _shaped(value, source, lenient=lenient)


def _shaped(value: Json, source: str, *, lenient: bool = False) -> WorkOrder:
    try:
        # Words of a command line that are no text (lone surrogates) are found by writing them.
        canonical.encode(value)
        return read_work_order(value, lenient=lenient)
    except ValueError as error:
        raise wrong(f"{source} is no work order: {error}", "see `backplane schema work_order`") from error


def _workspace(spec: WorkspaceSpec, args: Args, cwd: Path) -> WorkspaceSpec:
    root = os.path.normpath(cwd / (args.root if args.root is not None else spec.root))
    try:
        root.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(root).decode("utf-8", "backslashreplace")
        fact = f"the workspace '{shown}' has a name that is no UTF-8, and no order can say it"
        raise wrong(fact, "rename it, or work by way of a link to it") from error
    return _replace(
        spec,
        root=root,
        mode="pass_through" if args.in_place else spec.mode,
        include=(*spec.include, *args.include),
        exclude=(*spec.exclude, *args.exclude),
    )


def _context(packet: ContextPacket, names: list[str], root: Path, cwd: Path) -> ContextPacket:
    """A file of the workspace goes along by its path there, any other as what it says."""
    files, snippets = list(packet.files), list(packet.snippets)
    for name in names:
        path = Path(os.path.normpath(cwd / name))
        if path.is_relative_to(root) and os.path.exists(path):
            files.append(path.relative_to(root).as_posix())
        else:
            snippets.append(Snippet(name, _text(name)))
    return ContextPacket(tuple(files), tuple(snippets))


def images(names: Sequence[str]) -> tuple[Image, ...]:
    """Read pictures from files, `-` is stdin.

    Raises:
        ConfigError: `config_invalid`, one cannot be read or is none that a model takes, or they are too large.
    """
    from backplane.contract import pictures

    bound = pictures.IMAGE_BYTES_MAX
    shown = [pictures.image_from(streams.read_input(name, bound), streams.source(name)) for name in names]
    return pictures.checked(shown)


def _text(name: str) -> str:
    data = streams.read_input(name)
    if len(data) > SNIPPET_BYTES_MAX:
        raise wrong(f"the context file {name!r} is over {SNIPPET_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise wrong(f"the context file {name!r} is no UTF-8 text") from error


def _policy(profile: PolicyProfile, args: Args, cwd: Path, configured: str | PolicyProfile | None) -> PolicyProfile:
    name = args.policy if args.policy is not None else configured if profile == PolicyProfile() else None
    if isinstance(name, PolicyProfile):
        profile = name
    elif name is not None:
        profile = read_policy(name)
    if args.allow_tool or args.deny_tool:
        profile = with_defaults(profile)  # A rule is added to what would count without it.
    return _replace(
        profile,
        allowed_tools=(*profile.allowed_tools, *args.allow_tool),
        disallowed_tools=(*profile.disallowed_tools, *args.deny_tool),
    )


def requirement(text: str) -> Requirement:
    name, equals, level = text.partition("=")
    if equals and level not in _LEVELS:
        raise wrong_words(f"--require {text!r}: the level is one of {', '.join(_LEVELS)}")
    return Requirement(name, level if equals else "emulated")  # type: ignore[arg-type]  # one of `_LEVELS`


def _config(config: RuntimeConfig, args: Args) -> RuntimeConfig:
    vendor = config.vendor
    for text in args.param:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise wrong_words(f"--param {text!r} is not of the form KEY=JSON")
        vendor = _nested(vendor, key.split("."), _parameter(value), text)
    if args.image:
        own = vendor.get("abp")
        before = own.get("images") if isinstance(own, dict) else None
        rows = [*(before or ()), *msgspec.to_builtins(images(args.image))]
        vendor = _nested(vendor, ["abp", "images"], rows, "--image")
    if args.isolation is not None:
        vendor = _nested(vendor, ["abp", "isolation"], args.isolation, "--isolation")
    if args.fail_on:
        vendor = _nested(vendor, ["abp", "fail_on"], _fail_on(args.fail_on), "--fail-on")
    if args.lenient:
        vendor = _nested(vendor, ["abp", "lenient"], True, "--lenient")
    if args.pure:
        vendor = _nested(vendor, ["abp", "pure"], True, "--pure")
    if args.checkpoints:
        vendor = _nested(vendor, ["abp", "checkpoints"], "auto", "--checkpoints")
    if args.model is not None and not args.model.strip():
        raise wrong_words("--model names no model", "leave it out for the backend's own choice")
    budget, turns = args.max_budget_usd, args.max_turns
    if budget is not None and not 0 <= budget < float("inf"):
        raise wrong_words(f"--max-budget-usd {budget} is no amount of money", "for example 0.50")
    if turns is not None and not 0 <= turns <= TURNS_MAX:
        raise wrong_words(f"--max-turns {turns} is not between 0 and {TURNS_MAX}")
    return RuntimeConfig(
        model=args.model if args.model is not None else config.model,
        vendor=vendor,
        env=config.env,
        max_budget_usd=budget if budget is not None else config.max_budget_usd,
        max_turns=turns if turns is not None else config.max_turns,
    )


def _fail_on(given: Sequence[str]) -> list[Json]:
    """Read the words of `--fail-on`: lists of findings, or `none`."""
    words = [word.strip() for text in given for word in text.split(",")]
    if words == ["none"]:
        return []
    if unknown := [word for word in words if word not in FINDINGS]:
        raise wrong_words(
            f"--fail-on {unknown[0]!r} is not a finding", f"give some of {', '.join(FINDINGS)}, or only none"
        )
    return list(dict.fromkeys(words))


def _parameter(text: str) -> Json:
    """JSON where it is JSON; a plain word stands for itself."""
    try:
        return strict(text.encode())
    except (ValueError, RecursionError):
        return text


def _nested(vendor: dict[str, Any], keys: list[str], value: Json, option: str) -> dict[str, Any]:
    first, *rest = keys
    if not rest:
        return {**vendor, first: value}
    inner = vendor.get(first, {})
    if not isinstance(inner, dict):
        raise wrong_words(f"{option}: config.vendor already has a value at {first!r}")
    return {**vendor, first: _nested(inner, rest, value, option)}


def _variables(args: Args, environ: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in args.env:
        found |= _variable(text, environ, "--env")
    return found


def _variable(text: str, environ: Mapping[str, str], source: str) -> dict[str, str]:
    """One `K=V`, or `K` with our own value. Errors name the variable, never its value."""
    name, equals, value = text.partition("=")
    if not name or "\0" in text:
        raise wrong_words(f"{source}: a variable without a name")
    if equals:
        return {name: value}
    if name not in environ:
        raise wrong_words(f"{source}: {name!r} is not set here", f"{name}=VALUE gives one")
    return {name: environ[name]}
