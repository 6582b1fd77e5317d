"""Builds and checks work orders from what a Python program passes, before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Unpack, get_args

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.receipt import Receipt
from backplane.contract.unknown import nearest_name, unknown_pointers
from backplane.contract.work import Lane, Mode, PolicyProfile, WorkOrder
from backplane.errors import ConfigError, require_type
from backplane.policy.rules import (
    POLICY_BYTES_MAX,
    PROFILES,
    parse_policy,
    unknown_names,
    unknown_tools,
    unmatched_paths,
)
from backplane.runtime.hooks import Hook
from backplane.runtime.options import RouteOptions, RunOptions

_WORDS: Final[dict[str, tuple[str, ...]]] = {"lane": get_args(Lane), "workspace.mode": get_args(Mode)}

_PARTS: Final = {
    name: type(value)
    for name in WorkOrder.__struct_fields__
    if isinstance(value := getattr(WorkOrder(""), name), msgspec.Struct)
}
"""Members of an order that are structs → their types, which are checked because a program may give anything."""


def make_order(
    order: WorkOrder | str, configured_policy: PolicyProfile | str | None = None, **given: Unpack[RunOptions]
) -> WorkOrder:
    """Build the order of a run: options replace the order's own members, and the router's wishes are added to its own.

    Args:
        configured_policy: the configuration's policy, for an order without one.
        given: options of `backplane.start`; those that are not about the order have no effect here.

    Raises:
        ConfigError: `config_invalid`, a value has a wrong type or is not one of its choices.
        PolicyError: `policy_invalid`, the policy cannot be read.
    """
    named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    require_type(order, WorkOrder | str, "the order", "give the task as a str, or a backplane.WorkOrder")
    require_type(named.get("root"), str | os.PathLike | None, "`root`", "the path of a folder")
    require_type(named.get("wait_for_limit"), int | float | None, "`wait_for_limit`", "seconds, as a number")
    whole = WorkOrder(order) if isinstance(order, str) else order
    for name, kind in _PARTS.items():
        require_type(getattr(whole, name), kind, f"`{name}` of the order", f"a {kind.__name__}")
    replace = msgspec.structs.replace
    if "root" in named:
        whole = replace(whole, workspace=replace(whole.workspace, root=os.path.expanduser(os.fspath(named["root"]))))
    if "lane" in named:
        whole = replace(whole, lane=named["lane"])
    if config := {name: named[name] for name in ("model", "max_turns", "max_budget_usd") if name in named}:
        whole = replace(whole, config=replace(whole.config, **config))
    if "wait_for_limit" in named:
        whole = whole.with_abp("wait_for_limit_s", math.ceil(named["wait_for_limit"]))
    if "output" in named:
        whole = whole.with_abp("output_schema", schema_of(named["output"]))
    if wishes := {name: named[name] for name in RouteOptions.__annotations__ if name in named}:
        own = whole.abp("route")
        whole = whole.with_abp("route", {**(own if isinstance(own, dict) else {}), **wishes})
    profile = named.get("policy", configured_policy if whole.policy == PolicyProfile() else None)
    return check_order(whole if profile is None else replace(whole, policy=read_policy(profile)))


async def order_of(
    order: WorkOrder | str,
    opened: AsyncExitStack,
    configured_policy: PolicyProfile | str | None = None,
    **given: Unpack[RunOptions],
) -> WorkOrder:
    """Return the order as `make_order`, with the given functions as tools, which are served until `opened` is closed.

    Raises:
        ConfigError, PolicyError: as `make_order` and `functions.served`.
    """
    whole = make_order(order, configured_policy, **given)
    if not (tools := given.get("tools")):
        return whole
    require_type(tools, Sequence, "`tools`", "a list of functions")
    from backplane.runtime.functions import served  # Few programs pass functions.

    row = await opened.enter_async_context(served(tools, whole.config.env.values()))
    return whole.with_abp("mcp_servers", [*(whole.abp("mcp_servers") or ()), row])


def read_policy(policy: PolicyProfile | str) -> PolicyProfile:
    """Return a policy from a profile, the name of a shipped profile, or the path of a file.

    Raises:
        PolicyError: `policy_invalid`, the file is not a policy.
        ConfigError: `config_invalid`, there is no profile and no readable file of that name.
    """
    if isinstance(policy, PolicyProfile):
        try:  # A program may have used tuples in place of lists.
            made = msgspec.convert(msgspec.to_builtins(policy), PolicyProfile)
        except (TypeError, ValueError) as error:
            raise _invalid(f"the policy cannot be read: {error}", "its rules are lists of strings") from error
        return policy if made == policy else made
    require_type(policy, str, "the policy", "give a PolicyProfile, a profile's name, or a path")
    if policy in PROFILES:
        return PROFILES[policy]
    try:
        with Path(policy).open("rb") as file:
            data = file.read(POLICY_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        fact = f"no policy {policy[:80]!r}: {getattr(error, 'strerror', None) or error}"
        near = nearest_name(policy, PROFILES)
        meant = f"did you mean {near}? " if near else ""
        raise _invalid(fact, f"{meant}a shipped profile ({', '.join(PROFILES)}) or the path of a file") from error
    return parse_policy(data, policy)


def without_effect(
    order: WorkOrder, unheard: Sequence[str], hooked: Iterable[str] = (), root: str | None = None
) -> Iterator[tuple[str, Json, str]]:
    """Yield the parts of an order without effect, each as a name, its values, and the run's warning about them.

    Args:
        unheard: names of the order's settings without effect.
        hooked: names of tools in the hooks of the run.
        root: the copy in which the agent works; None before the copy is made.
    """
    if unheard:
        yield "unheard", list(unheard), f"without effect in the order: {', '.join(unheard)}"
    if tools := unknown_tools(order.policy):
        fact = f"tools of the policy that are not known here: {_shown(tools)}; each rule holds for exactly its name"
        yield "unknown_tools", dict(tools), fact
    if tools := unknown_names(hooked):
        fact = f"tools of hooks that are not known here: {_shown(tools)}; a hook is asked for exactly these names"
        yield "unknown_hook_tools", dict(tools), fact
    if paths := unmatched_paths(order.policy, order.workspace):
        fact = f"patterns that match no file of the workspace: {_shown(paths)}; each is to be a path from its root"
        yield "unmatched_paths", dict(paths), fact
    if (include := order.workspace.include) and root is not None and set(os.listdir(root)) <= {".git"}:
        fact = f"the workspace is empty: include matches no file ({', '.join(include)})"
        yield "empty_workspace", list(include), fact


def log_without_effect(order: WorkOrder, hooks: Iterable[Hook]) -> None:
    """Log to `backplane` which parts of an order have no effect, as the run only warns of them in its events."""
    hooked = [tool for hook in hooks for tool in hook.tools]
    for _, _, fact in without_effect(order, list(unknown_pointers(order.config.vendor)), hooked):
        import logging  # Most orders have no such part.

        logging.getLogger("backplane").warning(fact)


def _shown(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} ({near}?)" if near else name for name, near in found.items())


def check_order(order: WorkOrder) -> WorkOrder:
    """Return the order as a host reads it, or refuse an order with wrong types, words or numbers.

    A list is accepted in place of a tuple. An order that works in place and selects files is refused.

    Raises:
        ConfigError: `config_invalid`, with the member, its value and the choices.
    """
    for name, words in _WORDS.items():
        value: Any = order
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, str) and value not in words:
            near = nearest_name(value, words)
            choices = " or ".join(map(repr, words))
            raise _invalid(f"`{name}` is {value[:40]!r}", f"did you mean {near!r}?" if near else f"it is {choices}")
    if not order.task.strip() if isinstance(order.task, str) else False:
        raise _invalid("the task is empty", "say in words what to do")
    try:
        as_read = msgspec.json.decode(msgspec.json.encode(order), type=WorkOrder)
    except (TypeError, ValueError) as error:
        fact = f"the order is none of the contract's: {error}"
        raise _invalid(fact, "see `backplane schema work_order`") from error
    # JSON writes null for NaN and infinity, and null would mean no limit.
    if as_read != order and (place := _no_number(msgspec.to_builtins(order))) is not None:
        raise _invalid(f"`{place[1:]}` is no finite number", "leave it out for no limit")
    if order.workspace.mode == "pass_through" and (order.workspace.include or order.workspace.exclude):
        # The agent sees the whole folder: a selection would only hide its changes from patch and receipt.
        fact = "`workspace.include` and `exclude` select what a copy holds; in place they would hide changes"
        raise _invalid(fact, "leave them out, or work in a copy (mode staged)")
    return order if as_read == order else as_read


def _no_number(value: Json) -> str | None:
    """Return the place of the first number that is not finite, as `.config.max_budget_usd`; None if there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    places = ((name, _no_number(one)) for name, one in rows)
    return next((f".{name}{place}" for name, place in places if place is not None), None)


def schema_of(output: Any) -> dict[str, Any]:
    """Return the JSON Schema of a msgspec struct, dataclass, TypedDict or pydantic model, or of a given schema itself.

    Raises:
        ConfigError: `config_invalid`, the type has no schema.
    """
    if isinstance(output, Mapping):
        return dict(output)
    if hasattr(output, "model_json_schema"):
        schema: dict[str, Any] = output.model_json_schema()
        return schema
    try:
        (whole,), named = msgspec.json.schema_components((output,), ref_template="#/$defs/{name}")
    except (TypeError, ValueError) as error:
        raise _invalid(f"no JSON Schema can be made of the output type: {error}", "give a schema as a dict") from error
    name = whole.get("$ref", "").removeprefix("#/$defs/")
    if name in named:
        # Vendors want an object at the top and refuse a reference there.
        is_recursive = f'"#/$defs/{name}"'.encode() in msgspec.json.encode(named)
        whole = dict(named[name]) if is_recursive else dict(named.pop(name))
    return {**whole, "$defs": named} if named else whole


def answer_of(receipt: Receipt, output: Any) -> Any:
    """Return a run's structured answer as the `output` type; None if there is no answer.

    Args:
        output: as in `schema_of`; a schema, or None, gives plain JSON.

    Raises:
        ConfigError: `validation_failed`, the answer is not of that type.
    """
    raw = receipt.usage_raw
    value = raw.get("structured_output") if isinstance(raw, dict) else None
    if value is None or output is None or isinstance(output, Mapping):
        return value
    try:
        return output.model_validate(value) if hasattr(output, "model_validate") else msgspec.convert(value, output)
    except (TypeError, ValueError) as error:
        name = getattr(output, "__name__", output)
        raise ConfigError("validation_failed", f"the answer is no {name}: {error}") from error


def _invalid(fact: str, hint: str | None = None) -> ConfigError:
    return ConfigError("config_invalid", fact, hint=hint)
