"""Reads, writes and changes one text file of the workspace.

Checked inputs come in, a `CallResult` comes out. `places` follows links and asks the policy.
"""

from __future__ import annotations

from typing import Any, Final

from backplane.tools.places import FILE_BYTES_MAX, ToolRefused, Tree
from backplane.tools.results import CallResult, ChangedFile

READ_LINES_MAX: Final = 2000
"""Most lines of one answer; the model reads on with `offset`."""

READ_CHARS_MAX: Final = 64 * 1024
"""Most characters of one answer, some 16,000 tokens."""

_SNIFFED_BYTES: Final = 8192


def read_file(tree: Tree, input: dict[str, Any]) -> CallResult:
    """Return the text of a file, or the wanted lines of it."""
    data = tree.read(input["path"])
    if b"\0" in data[:_SNIFFED_BYTES]:
        raise ToolRefused(f"{input['path']} is no text ({len(data)} bytes)")
    lines = data.decode("utf-8", "replace").split("\n")
    # JSON Schema takes 2.0 for an integer.
    first, limit = int(input.get("offset", 1)), int(input.get("limit", READ_LINES_MAX))
    column = int(input.get("column", 1))
    if first > len(lines):
        raise ToolRefused(f"{input['path']} has {len(lines)} lines")
    if column > max(len(lines[first - 1]), 1):
        raise ToolRefused(f"line {first} of {input['path']} has {len(lines[first - 1])} characters")
    wanted = lines[first - 1 : first - 1 + min(limit, READ_LINES_MAX)]
    text = "\n".join([wanted[0][column - 1 :], *wanted[1:]])
    shown = text[:READ_CHARS_MAX].split("\n")
    last = first + len(shown) - 1
    end = len(shown[-1]) + (column - 1 if last == first else 0)
    if end < len(lines[last - 1]):
        cut = f"line {last} up to character {end} of {len(lines[last - 1])}"
        return CallResult("\n".join([*shown, f"[{cut}; read on with offset {last} and column {end + 1}]"]))
    if last < len(lines):
        shown.append(f"[lines {first} to {last} of {len(lines)}; read on with offset {last + 1}]")
    return CallResult("\n".join(shown))


def write_file(tree: Tree, input: dict[str, Any]) -> CallResult:
    """Make a file, or replace it."""
    data = _encoded(input["content"])
    place, is_new = tree.write(input["path"], data)
    did = "made" if is_new else "replaced"
    return CallResult(f"{did} {place}, {len(data)} bytes", changes=(ChangedFile(place, did),))


def edit_file(tree: Tree, input: dict[str, Any]) -> CallResult:
    """Replace a text in a file, once or everywhere."""
    path, old, new = input["path"], input["old"], input["new"]
    if old == new:
        raise ToolRefused("old and new are the same")
    try:
        text = tree.read(path).decode()
    except UnicodeDecodeError as error:
        raise ToolRefused(f"{path} is no UTF-8 text") from error
    if old not in text and "\r\n" in text:
        # A model that read the lines writes them with \n.
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    count = text.count(old)
    if count == 0:
        raise ToolRefused(f"old does not stand in {path}; read the file and copy the text exactly")
    if not input.get("all", False) and (count > 1 or text.find(old, text.find(old) + 1) >= 0):
        # `str.count` skips overlapping matches; they are ambiguous, too.
        raise ToolRefused(f"old stands {max(count, 2)} times in {path}; give more of its surroundings, or all: true")
    if len(text) + count * (len(new) - len(old)) > FILE_BYTES_MAX:
        raise ToolRefused(f"the file would be over {FILE_BYTES_MAX} bytes")
    place, _ = tree.write(path, _encoded(text.replace(old, new)))
    return CallResult(f"changed {count} place{'s' * (count > 1)} in {place}", changes=(ChangedFile(place, "edited"),))


def _encoded(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ToolRefused("the text has half a character (a lone surrogate)") from error
    if len(data) > FILE_BYTES_MAX:
        raise ToolRefused(f"the text is over {FILE_BYTES_MAX} bytes")
    return data
