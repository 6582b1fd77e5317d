"""Caches the last hello of each backend, so that an unsupported order is refused without starting a process.

An unreadable file counts as missing.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from backplane.contract import canonical
from backplane.contract.canonical import timestamp_at
from backplane.receipts.journal import replace_file


def kept_manifest(home: Path, key: str) -> dict[str, Any] | None:
    """Return the hello stored under this key; None if there is none.

    Args:
        key: backend, and everything on which its hello depends (command, version, settings).
    """
    try:
        value = canonical.decode(_path(home, key).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("key") != key:
        return None
    hello = value.get("hello")
    return hello if isinstance(hello, dict) else None


def kept_since(home: Path, key: str) -> str:
    """Return the time at which the hello under this key was received; empty if there is none."""
    try:
        return timestamp_at(_path(home, key).stat().st_mtime_ns)
    except OSError:
        return ""


def keep_manifest(home: Path, key: str, hello: dict[str, Any], known: dict[str, Any] | None = None) -> None:
    """Replace the hello under this key atomically.

    If it has not changed, only its time is updated.

    Args:
        known: the hello that `kept_manifest` returned for this key; None if it was not read.

    Raises:
        StoreError: `receipt_store_failed`, the disk fails; callers may continue without the cache.
    """
    if known == hello:
        with suppress(OSError):
            os.utime(_path(home, key))
            return
    replace_file(_path(home, key), canonical.encode({"key": key, "hello": hello}))


def _path(home: Path, key: str) -> Path:
    return home / "manifests" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
