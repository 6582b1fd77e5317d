"""Translates Codex's items to calls of the contract's tools, and their results. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backplane.agents.calls import OpenCall
from backplane.agents.events import mapping, mappings, plain_command, relative
from backplane.contract.canonical import Json


def called(item: Mapping[str, Any], root: str) -> OpenCall | None:
    """Return the tool call in an item; None if the item is no call."""
    kind, id = str(item.get("type")), str(item.get("itemId", item.get("id")))
    if kind == "commandExecution":
        input: dict[str, Json] = {"command": plain_command(str(item.get("command") or ""))}
        if item.get("cwd") not in (None, root):
            input["cwd"] = item["cwd"]
        return OpenCall(id, "exec_command", "bash", input, kind)
    if kind == "fileChange":
        changes = [_change(change, root) for change in mappings(item.get("changes"))]
        kinds = operations({"changes": changes})
        name = kinds[0] if len(kinds) == 1 else "apply_patch"
        return OpenCall(id, "apply_patch", name, {"changes": changes}, kind)
    if kind == "mcpToolCall":
        name = f"mcp__{item.get('server')}__{item.get('tool')}"
        return OpenCall(id, name, name, item.get("arguments"), kind)
    if kind == "webSearch":
        return OpenCall(id, "web_search", "web_search", {"query": item.get("query")}, kind)
    if kind == "imageView":
        return OpenCall(id, "read_file", "read_file", {"path": item.get("path")}, kind)
    if kind == "dynamicToolCall":
        return OpenCall(id, str(item.get("tool")), str(item.get("tool")), item.get("arguments"), kind)
    return None


def operations(patch: Json) -> list[str]:
    """Return the names of the contract's tools that have the effect of a patch."""
    kinds = [change["kind"] for change in mappings(mapping(patch).get("changes"))]
    return list(dict.fromkeys("write_file" if kind == "add" else "edit_file" for kind in kinds))


def _change(change: Mapping[str, Any], root: str) -> dict[str, Json]:
    kind, diff = mapping(change.get("kind")), str(change.get("diff") or "")
    sign = {"add": "+", "delete": "-"}.get(str(kind.get("type")))
    # A whole file is no patch: without a sign its lines could read like one.
    text = "".join(f"{sign}{line}" for line in diff.splitlines(keepends=True)) if sign else diff
    made: dict[str, Json] = {"path": relative(str(change.get("path")), root), "kind": kind.get("type"), "diff": text}
    if kind.get("move_path"):
        made["move_path"] = relative(str(kind["move_path"]), root)
    return made


def changed_files(item: Mapping[str, Any], root: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for change in item.get("changes") or ():
        made = _change(mapping(change), root)
        pairs.append((str(made["path"]), str(made["kind"])))
        if "move_path" in made:
            pairs.append((str(made["move_path"]), "moved here"))
    return pairs


def result_of(call: OpenCall, item: Mapping[str, Any], failed: bool) -> Json:
    if item.get("status") == "declined":
        return "the call was declined"
    if call.kind == "commandExecution":
        return str(item.get("aggregatedOutput") or "")
    if call.kind == "mcpToolCall":
        return item.get("error") if failed and item.get("error") else item.get("result")
    if call.kind == "dynamicToolCall":
        return item.get("contentItems")
    if call.kind == "webSearch":
        return {"action": item.get("action"), "results": item.get("results")}
    return str(item.get("status") or "done")
