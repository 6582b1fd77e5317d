"""Reads a project's own instructions for its agents (`AGENTS.md`), for a model that reads no files itself.

Vendors' agents read these files themselves; `instruction_files` of their host's hello names them. A host that lists
`project_instructions` in `heeds` gets their text at the end of the order's system prompt.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from backplane.agents.rows import INSTRUCTION_FILES
from backplane.contract.canonical import Json
from backplane.contract.work import WorkOrder
from backplane.policy.rules import Policy

BYTES_MAX: Final = 32 * 1024
"""Maximum size of all files together, as in Codex (`project_doc_max_bytes`); what is over it is cut, farthest first."""

FOLDERS_MAX: Final = 64
"""Maximum number of folders above the workspace in which files are searched; paths are rarely 20 folders deep."""

_HEAD: Final = (
    "Instructions of the project, from files in its folders. Where two of them disagree, the later one wins, as its "
    "folder is nearer; what is said above, and the task, win over all of them. A folder below may have its own file "
    f"({' or '.join(INSTRUCTION_FILES)}): read it before you work there."
)


class ProjectInstructions(NamedTuple):
    """Project instructions that apply to a folder.

    Attributes:
        text: the files' texts, the farthest folder's first; empty if no folder has one.
        files: one row for each file as the receipt has it: `path` (relative to the workspace), `sha256` and `bytes` of
            the part that was read, and `cut_from`, the file's whole size, if it was cut.
    """

    text: str = ""
    files: tuple[dict[str, Json], ...] = ()

    def added_to(self, order: WorkOrder) -> WorkOrder:
        """Return an order with the instructions below its own system prompt."""
        own = order.abp("system")
        return order.with_abp("system", "\n\n".join(part for part in (own, self.text) if part)) if self.text else order


def read_instructions(tree: Path, original: Path, policy: Policy) -> ProjectInstructions:
    """Read the instructions that hold for a workspace, from its own folder up to the root of its repository. Blocks.

    Args:
        tree: the folder that the agent works in: the copy, or the original itself.
        original: the folder that the order names; the folders above are its folders.
        policy: files that it does not allow to read are skipped.
    """
    rows: list[dict[str, Json]] = []
    texts: list[str] = []
    left = BYTES_MAX
    for shown, folder, top in _folders(tree, original):  # The nearest first: it is the last to be cut.
        for name in INSTRUCTION_FILES:
            path = shown + name
            place = _find(folder / name, top, policy, os.path.normpath(original.absolute() / path))
            if place is not None:
                break
        else:
            continue
        data, size = _read(place)
        if not data.strip() or b"\0" in data:
            continue
        kept = data[:left]
        row: dict[str, Json] = {"path": path, "sha256": hashlib.sha256(kept).hexdigest(), "bytes": len(kept)}
        rows.insert(0, row if len(kept) == size else {**row, "cut_from": size})
        if kept:
            texts.insert(0, f"# {path}\n\n{kept.decode('utf-8', 'replace').strip()}")
        left -= len(kept)
    return ProjectInstructions("\n\n".join([_HEAD, *texts]) if texts else "", tuple(rows))


def _folders(tree: Path, original: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield each folder, the nearest first: its path in the receipt, itself, and the folder that no link may leave."""
    original = original.absolute()
    yield "", tree, tree
    above = (original, *original.parents)[: FOLDERS_MAX + 1]
    top = next((number for number, folder in enumerate(above) if os.path.lexists(folder / ".git")), 0)
    for number in range(1, top + 1):
        yield "../" * number, above[number], above[top]


def _find(path: Path, top: Path, policy: Policy, original: str) -> str | None:
    """Return the place of a file that may be read; None if it is absent, denied, or outside of `top`.

    Args:
        original: path of the file in the folder that the order names, for rules with absolute paths.
    """
    try:
        place, bound = os.path.realpath(path, strict=True), os.path.realpath(top)
    except OSError:
        return None
    if not place.startswith(bound.rstrip("/") + "/") or not os.path.isfile(place):
        return None
    # Rules count from the workspace; a file above it is judged as if the repository were the workspace, too.
    asked = ((path.name, bound), (os.path.relpath(place, bound), bound), (place, None), (original, None))
    return None if any(policy.decide_read(name, root).allowed == "deny" for name, root in asked) else place


def _read(place: str) -> tuple[bytes, int]:
    """Return the first `BYTES_MAX` bytes of a file, and its size; nothing if it cannot be read."""
    try:
        with open(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            return file.read(BYTES_MAX), os.fstat(file.fileno()).st_size
    except OSError:
        return b"", 0
