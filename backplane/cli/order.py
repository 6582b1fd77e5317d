"""Work orders from options and files; an option replaces the file's value."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins
from msgspec.structs import replace

from backplane.cli import streams
from backplane.cli.command import Args, wrong, wrong_words
from backplane.contract import canonical, pictures
from backplane.contract.canonical import Json
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.conversation import Image
from backplane.contract.unknown import read_work_order
from backplane.contract.work import ContextPacket, PolicyProfile, Snippet, WorkOrder
from backplane.errors import BackplaneError
from backplane.policy.rules import with_defaults
from backplane.protocol.lines import strict
from backplane.receipts.pieces import unheard_names
from backplane.redact.secrets import Redactor
from backplane.runtime.orders import make_order, without_effect

SNIPPET_BYTES_MAX: Final = 1024 * 1024
"""Largest context file from outside the workspace: it travels in the order, and a model reads far less."""


def build(
    args: Args,
    environ: Mapping[str, str],
    cwd: Path,
    policy: str | PolicyProfile | None,
    given: WorkOrder | None = None,
) -> WorkOrder:
    """Return the work order of a command. Raises ConfigError, or PolicyError `policy_invalid`.

    Args:
        policy: the configuration's policy, for an order that brings none.
        given: the order that the options change; None reads the one that they name.
    """
    order = given or _read(args)
    env = {**order.config.env, **dict(_variable(text, environ) for text in args.env)}
    with redacted(env):
        vendor = _with_parameters(order.config.vendor, args.param)
        root = os.path.normpath(cwd / (args.root or order.workspace.root))
        if root.encode(errors="replace").decode() != root:
            fact = f"the name of the workspace {os.fsencode(root)!r} is not UTF-8, as an order requires"
            raise wrong(fact, "rename the folder, or give a symbolic link to it as --root")
        made = make_order(
            replace(order, config=replace(order.config, env=env, vendor=vendor)),
            root=root,
            model=args.model,
            policy=args.policy,
            lane="workspace_first" if args.apply else None,
            max_turns=args.max_turns,
            max_budget_usd=args.max_budget_usd,
            wait_for_limit=args.wait_for_limit,
            configured_policy=policy,
        )
        space, rules = made.workspace, made.policy
        if args.allow_tool or args.deny_tool:
            rules = with_defaults(rules)  # A rule is added to what would count without it.
        made = replace(
            made,
            workspace=replace(
                space,
                mode="pass_through" if args.in_place else space.mode,
                include=(*space.include, *args.include),
                exclude=(*space.exclude, *args.exclude),
            ),
            policy=replace(
                rules,
                allowed_tools=(*rules.allowed_tools, *args.allow_tool),
                disallowed_tools=(*rules.disallowed_tools, *args.deny_tool),
            ),
            requirements=Requirements((*made.requirements.required, *map(_requirement, args.require))),
            context=_with_context(made.context, args.context, cwd, Path(space.root)),
        )
        return with_settings(made, _settings(args, made))


def with_settings(order: WorkOrder, settings: Mapping[str, Json]) -> WorkOrder:
    """Return an order with members of `config.vendor.abp`, by their names; None leaves one as it is."""
    for name, value in settings.items():
        order = order if value is None else order.with_abp(name, value)
    return order


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


def _read(args: Args) -> WorkOrder:
    if (args.task is None) == (args.order is None):
        fact = "no task is given" if args.task is None else "TASK and --order are given together"
        raise wrong_words(fact, 'give one of them: `backplane run "…"`, or `backplane run --order FILE`')
    if args.order is not None:
        return read_order(streams.read_input(args.order), streams.source(args.order), lenient=args.lenient)
    return WorkOrder(streams.read_text("-") if args.task == "-" else args.task)


def read_order(data: bytes, source: str, *, lenient: bool = False) -> WorkOrder:
    """Read a work order; only `task` is required. Raises ConfigError: `config_invalid`, also for a duplicate key."""
    value = read_json(data, source)
    if (doubled := canonical.duplicate_key(data, value)) is not None:
        raise wrong(f"{source}: the key {doubled!r} appears twice in one object", "remove one of the two keys")
    try:
        return read_work_order(value, lenient=lenient)
    except ValueError as error:
        hint = "correct it by the schema that `backplane schema work_order` prints"
        raise wrong(f"{source} is not a work order: {error}", hint) from error


def read_json(data: bytes, source: str) -> Json:
    """Read strict JSON. Raises ConfigError: `config_invalid`."""
    try:
        return strict(data)
    except (ValueError, RecursionError) as error:
        raise wrong(f"{source} is not strict JSON: {error}", "correct the JSON at that place") from error


def _with_context(packet: ContextPacket, names: list[str], cwd: Path, root: Path) -> ContextPacket:
    """Name files of the workspace by their paths there, and add the content of any others."""
    for name in names:
        path = Path(os.path.normpath(cwd / name))
        if path.is_relative_to(root) and os.path.exists(path):
            packet = replace(packet, files=(*packet.files, path.relative_to(root).as_posix()))
        else:
            snippet = Snippet(name, streams.read_text(name, SNIPPET_BYTES_MAX))
            packet = replace(packet, snippets=(*packet.snippets, snippet))
    return packet


def _requirement(text: str) -> Requirement:
    name, _, level = text.partition("=")
    return Requirement(name, level or "emulated")  # type: ignore[arg-type]  # The whole order is checked later.


def _variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Read `K=V`, or `K` with our own value. Errors name the variable, never its value."""
    name, equals, value = text.partition("=")
    if not name:
        raise wrong_words("--env has no name before the =", "give --env NAME=VALUE, or --env NAME")
    if not equals and name not in environ:
        raise wrong_words(f"--env {name!r}: this variable is not set", f"set it, or give --env {name}=VALUE")
    return name, value if equals else environ[name]


def _with_parameters(vendor: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """Return `config.vendor` with members as `abp.route.seed=7`."""
    made = deepcopy(vendor)
    for text in options:
        key, equals, value = text.partition("=")
        *path, last = key.split(".")
        if not equals or not all((*path, last)):
            raise wrong_words(
                f"--param {text!r} is not of the form KEY=JSON", "give, for example, --param abp.route.seed=7"
            )
        place = made
        for name in path:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise wrong_words(f"{text}: config.vendor already has a value at {name!r}", "set each key only once")
        try:
            place[last] = strict(value.encode())
        except (ValueError, RecursionError):
            place[last] = value  # A plain word stands for itself.
    return made


def _settings(args: Args, order: WorkOrder) -> dict[str, Json]:
    """Return the members of `config.vendor.abp` that options stand for."""
    findings = [] if args.fail_on == ["none"] else ",".join(args.fail_on).split(",")
    return {
        "images": [*(order.abp("images") or ()), *to_builtins(images(args.image))] if args.image else None,
        "isolation": args.isolation,
        "fail_on": findings if args.fail_on else None,
        "lenient": args.lenient or None,
        "checkpoints": "auto" if args.checkpoints else None,
    }


def images(names: Sequence[str]) -> tuple[Image, ...]:
    """Read pictures from files, `-` is stdin. Raises ConfigError: `config_invalid`, a model takes none such."""
    files = [(streams.read_input(name, pictures.IMAGE_BYTES_MAX), streams.source(name)) for name in names]
    return pictures.checked([pictures.image_from(data, source) for data, source in files])


def server(text: str) -> Json:
    """Read an MCP server, `NAME=COMMAND` or `NAME=URL`."""
    name, _, value = text.partition("=")
    if value.startswith(("http://", "https://")):
        return {"name": name, "url": value}
    command, *arguments = words_of(value, f"--mcp {name}")
    return {"name": name, "command": command, "args": arguments}


def words_of(command: str, option: str) -> tuple[str, ...]:
    """Split the command of an option as a shell would. Raises ConfigError `usage_invalid`."""
    try:
        words, why = tuple(shlex.split(command)), "it is empty"
    except ValueError as error:
        words, why = (), str(error)
    if not words:
        raise wrong_words(f"{option}: cannot parse the command: {why}", "give a command with balanced quotes")
    return words
