"""Makes rows of an order from configured MCP servers, with the values of the variables that they name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from backplane.agents import rows
from backplane.config import ServerSettings
from backplane.contract.work import WorkOrder
from backplane.errors import BackendError


def variable(whose: str, name: str, environ: Mapping[str, str], secrets: list[str], *, hint: str = "") -> str:
    """Return the value of a variable, and add it to `secrets`.

    Raises:
        BackendError: `backend_unavailable`, the variable is not set.
    """
    if name not in environ:
        fact = f"{whose} needs the environment variable {name}, which is not set"
        raise BackendError("backend_unavailable", fact, hint=f"export {name}=…{hint}")
    secrets.append(environ[name])
    return environ[name]


def resolved(whose: str, values: Mapping[str, str], environ: Mapping[str, str], secrets: list[str]) -> dict[str, str]:
    """Return settings in which each value `$NAME` is replaced by the variable of that name. Raises as `variable`."""
    return {
        key: variable(whose, value[1:], environ, secrets) if value.startswith("$") else value
        for key, value in values.items()
    }


def server_rows(
    servers: Mapping[str, ServerSettings], options: Mapping[str, Any], environ: Mapping[str, str], secrets: list[str]
) -> tuple[dict[str, Any], ...]:
    """Return a row for each configured MCP server, unless the backend's options define one of that name.

    Raises:
        BackendError: `backend_unavailable`, a variable that a server needs is not set.
    """
    defined = options.get("mcp_servers")
    own = {row.get("name") for row in defined if isinstance(row, dict)} if isinstance(defined, list) else set()
    found = []
    for name, asked in servers.items():
        if name in own:
            continue
        command = asked.command or ()
        row: dict[str, Any] = {"name": name}
        row |= {"command": command[0], "args": list(command[1:])} if command else {"url": asked.url}
        if asked.tool_s is not None:
            row["tool_ms"] = round(asked.tool_s * 1000)
        for member, values in (("env", asked.env), ("headers", asked.headers)):
            if values:
                row[member] = resolved(f"the MCP server {name!r}", values, environ, secrets)
        found.append(row)
    return tuple(found)


def with_servers(order: WorkOrder, added: Sequence[dict[str, Any]]) -> WorkOrder:
    """Return an order with further MCP servers before its own; the order's own win over others of the same name."""
    ordered = order.abp("mcp_servers")
    own = ordered if isinstance(ordered, list | tuple) else ()
    return order.with_abp("mcp_servers", [*added, *own]) if added else order


def with_call_limit(order: WorkOrder, limit_s: float) -> WorkOrder:
    """Return an order that gives every MCP server without a `tool_ms` this limit."""
    ordered = order.abp("mcp_servers")
    if not ordered or not isinstance(ordered, list | tuple):
        return order
    limit = {"tool_ms": round(limit_s * 1000)}
    return order.with_abp("mcp_servers", [limit | row for row in ordered if isinstance(row, dict)])


def servers_of(listed: Iterable[object]) -> dict[str, tuple[str, ...]]:
    """Return the MCP servers of these rows: name → the words of the row that may name files.

    Rows that cannot be read are skipped, because the host reports them.
    """
    found: dict[str, tuple[str, ...]] = {}
    for row in listed:
        with suppress(msgspec.ValidationError):
            server = msgspec.convert(row, rows.McpServer)
            lists = (part for value in server.env.values() for part in value.split(os.pathsep))
            words = (server.command, *server.args, *lists)
            found[server.name] = tuple(word for word in words if word and "\0" not in word)
    return found
