"""What a test of a queue needs of this Python."""

from __future__ import annotations

import sqlite3

import pytest


def needs_queue() -> None:
    """Skip a test, or a whole file, where no queue on SQLite can be had."""
    pytest.importorskip("dbos", reason="needs dbos: not installed")
    from backplane.scale.durable import SQLITE_MIN

    if sqlite3.sqlite_version_info < SQLITE_MIN:
        pytest.skip("needs SQLite 3.42: older under this Python", allow_module_level=True)
