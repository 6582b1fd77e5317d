"""Orders declared pure (`config.vendor.abp.pure`), served from the store: the same was asked before, of the same tree.

What is served is a replay of the stored run with its patch, whose receipt links the original. Only complete runs are
kept, and only in this user's state folder. Whatever is missing or cannot be read is simply not there.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from backplane.config import Limits, Settings
from backplane.contract.canonical import Json
from backplane.contract.work import REPLAY, WorkOrder
from backplane.errors import BackplaneError, ConfigError
from backplane.runtime.backends import Backend, ReplayBackend
from backplane.runtime.replay import find_replay
from backplane.runtime.state import raise_error
from backplane.workspace.tree import paths_below

FOLDER: Final = "cache"

READ_BYTES: Final = 1 << 20

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700


def is_pure(order: WorkOrder) -> bool:
    """Whether an order may be served from the store.

    Raises:
        ConfigError: `config_invalid`, it says so in a way that cannot hold.
    """
    value = order.abp("pure", False)
    if not isinstance(value, bool):
        raise ConfigError("config_invalid", "config.vendor.abp.pure is neither true nor false")
    if value and order.workspace.mode != "staged":
        fact = "a pure order works in a copy: in place, its effect on the folder would be part of what it says"
        raise ConfigError("config_invalid", fact, hint="the mode staged, or without `pure`")
    return value


def key_of(order: WorkOrder, backend: Backend, settings: Settings, limits: Limits) -> str | None:
    """What the result of an order depends on, as one hash; None where that cannot be known. Blocks.

    The order without its id (with its policy), every file and link of its tree, the settings, and the host's programs
    as they are now.
    """
    has_hooks = bool(settings.hooks) or order.abp("hooks") is not None  # What they run may decide anything.
    if backend.remote or has_hooks or isinstance(backend, ReplayBackend):
        return None
    try:
        asked = {name: _plain(getattr(order, name)) for name in order.__struct_fields__ if name != "id"}
        told = [asked, _plain(settings), _plain(limits), backend.id, backend.key]
        tree = tree_sha256(Path(order.workspace.root), limits)
    except (OSError, TypeError, ValueError):
        return None
    return hashlib.sha256(msgspec.json.encode([*told, tree], order="sorted")).hexdigest()


def _plain(value: object) -> Json:
    plain: Json = msgspec.to_builtins(value, enc_hook=str, str_keys=True)
    return plain


def tree_sha256(root: Path, limits: Limits) -> str:
    """A hash of a folder's files and links by name, kind, rights and content; the insides of repositories aside.

    Raises:
        OSError: something cannot be read.
        ValueError: it is larger than a workspace may be.
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
            digest.update(str(facts.st_size).encode())
            with open(path, "rb") as file:
                while block := file.read(READ_BYTES):
                    digest.update(block)
    return digest.hexdigest()


def find_cached(home: Path, key: str) -> ReplayBackend | None:
    """The stored run of this key as a backend that tells it again; None where there is none to be served. Blocks."""
    try:
        run_id = (home / FOLDER / key).read_text()
        return find_replay(f"{REPLAY}{run_id}", home, with_patch=True, cached=True)
    except (OSError, ValueError, BackplaneError):
        return None


def keep(home: Path, key: str, run_id: str) -> None:
    """Note that a complete run is what this key gives. Blocks; a disk that fails keeps nothing."""
    folder = home / FOLDER
    fresh = folder / f".{key}.{os.getpid()}.{os.urandom(4).hex()}"
    with suppress(OSError):
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        with open(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE), "w") as file:
            file.write(run_id)
        os.replace(fresh, folder / key)
