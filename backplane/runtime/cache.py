"""Serves a pure order (`config.vendor.abp.pure`) from the store if the same order ran on the same tree before.

The answer is a replay of the stored run with its patch, and its receipt links the original. Only complete runs are
reused, and only those in this user's state folder. An entry that cannot be read is ignored.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from backplane.config import Limits, Settings
from backplane.contract.canonical import Json
from backplane.contract.work import REPLAY, WorkOrder
from backplane.errors import BackplaneError, ConfigError, StoreError
from backplane.policy.rules import compile_policy
from backplane.receipts.journal import replace_file
from backplane.runtime.backends import Backend
from backplane.runtime.hooks import Hook
from backplane.runtime.instructions import read_instructions
from backplane.runtime.replay import find_replay
from backplane.runtime.state import raise_error
from backplane.workspace.tree import paths_below

FOLDER: Final = "cache"


def find_cached(
    home: Path, order: WorkOrder, backend: Backend, settings: Settings, limits: Limits, hooks: Sequence[Hook]
) -> tuple[Backend, dict[str, Json]] | None:
    """Return the backend of a pure order, a replay of the stored run with the same key if there is one. Blocks.

    Args:
        hooks: those of the caller; an order that has some is never answered from the store.

    Returns:
        The backend and the receipt's member `cache`; None if the order is not pure, or its key cannot be known.

    Raises:
        ConfigError: `config_invalid`, the order works in place, or `pure` is no boolean.
    """
    value = order.abp("pure", False)
    if not isinstance(value, bool):
        raise ConfigError("config_invalid", "config.vendor.abp.pure is neither true nor false")
    if value and order.workspace.mode != "staged":
        fact = "a pure order works in a copy: in place, its effect on the folder would be part of what it says"
        raise ConfigError("config_invalid", fact, hint="the mode staged, or without `pure`")
    if not value or hooks or (key := _key_of(order, backend, settings, limits)) is None:
        return None
    try:
        run_id = (home / FOLDER / key).read_text()
        found = find_replay(f"{REPLAY}{run_id}", home, with_patch=True, cached=True)
    except (OSError, ValueError, BackplaneError):
        return backend, {"key": key, "hit": False}
    return found, {"key": key, "hit": True}


def _key_of(order: WorkOrder, backend: Backend, settings: Settings, limits: Limits) -> str | None:
    """Return a hash of all that an order's result depends on; None if that cannot be known.

    The hash covers the order with its policy but without its id, every file and link of its tree, the project's
    instructions above it, the settings, the limits, and the host's present programs.
    """
    has_hooks = bool(settings.hooks) or order.abp("hooks") is not None  # A hook's decision may depend on anything.
    if backend.remote or has_hooks or backend.replays is not None:
        return None
    try:
        asked = {name: getattr(order, name) for name in order.__struct_fields__ if name != "id"}
        known = msgspec.to_builtins([asked, settings, limits, backend.id, backend.key], enc_hook=str, str_keys=True)
        root = Path(order.workspace.root)
        tree = tree_sha256(root, limits)
        # Those above the workspace are not in its tree.
        instructions = read_instructions(root, root, compile_policy(order.policy)).files
    except (OSError, TypeError, ValueError):
        return None
    return hashlib.sha256(msgspec.json.encode([*known, tree, instructions], order="sorted")).hexdigest()


def tree_sha256(root: Path, limits: Limits) -> str:
    """Hash the paths below a folder by name, mode and content, without what is in `.git` folders.

    Raises:
        OSError: a file or folder cannot be read.
        ValueError: the folder is larger than a workspace may be.
    """
    digest, files, size = hashlib.sha256(), 0, 0
    for path in paths_below(root, without=(".git",), onerror=raise_error):
        facts = os.lstat(path)
        digest.update(f"\0{os.path.relpath(path, root)}\0{facts.st_mode}\0".encode("utf-8", "surrogateescape"))
        if stat.S_ISLNK(facts.st_mode):
            digest.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(facts.st_mode):
            files, size = files + 1, size + facts.st_size
            if files > limits.workspace_files_max or size > limits.workspace_bytes_max:
                raise ValueError("larger than a workspace may be")
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def keep(home: Path, key: str, run_id: str) -> None:
    """Store the id of a complete run as the answer for a key; a failed write is ignored. Blocks."""
    with suppress(StoreError):
        replace_file(home / FOLDER / key, run_id.encode())
