"""Finds the database and the content store of a queue, and opens them on demand."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backplane import config
from backplane.errors import ConfigError, install_hint
from backplane.scale.content import Contents

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine


def _invalid(fact: str, hint: str) -> ConfigError:
    return ConfigError("config_invalid", fact, hint=hint)


class QueuePlace:
    """The database and the content store of a queue: checked at once, and opened by `open`.

    Args:
        engine: URL of the engine; None means the file in this user's state folder.
        content: folder or URL of the content store; None means a folder beside the file.

    Attributes:
        is_new: True if the file does not exist yet.

    Raises:
        ConfigError: `config_invalid`: the URL names no queue, or the extra is not installed.
    """

    def __init__(self, engine: str | None, content: str | None = None) -> None:
        if find_spec("dbos") is None:
            raise _invalid("the queue's engine is not installed (dbos)", install_hint("scale"))
        self.url = engine if engine is not None else f"sqlite:///{config.home(os.environ) / 'queue.sqlite'}"
        is_file = self.url.startswith("sqlite:///")
        path = self.url.removeprefix("sqlite:///").partition("?")[0]
        if (not is_file and not self.url.startswith("postgresql://")) or (is_file and not path.strip("/")):
            fact = f"this {self.url.partition(':')[0][:40]!r} is not the URL of a queue"
            raise _invalid(fact, "give sqlite:///FILE, or postgresql://USER@HOST/DATABASE")
        self.content = content if content is not None or not is_file else f"{path}.content"
        self.is_new = is_file and not Path(path).exists()

    def contents(self) -> Contents:
        """Open the content store. Raises ConfigError `config_invalid` if none is named, or its URL cannot be used."""
        if self.content is None:
            fact = "a queue on a server needs a content store that all machines share"
            raise _invalid(fact, "give --content DIR or URL, the same for submitters and workers")
        return Contents(self.content)

    def open(self, *, may_make: bool = True, **settings: Any) -> DurableEngine:
        """Load the engine, which takes about a second.

        Args:
            may_make: create a missing file.

        Raises:
            ConfigError: `config_invalid`: there is no queue, or SQLite is too old.
            StoreError: `receipt_store_failed`, the database cannot be reached.
        """
        if self.is_new and not may_make:
            hint = "check --engine; `backplane queue submit`, `worker` and `limit` create a queue"
            raise _invalid(f"no queue at {self.url.removeprefix('sqlite:///')}", hint)
        from backplane.scale.durable import DurableEngine

        return DurableEngine(self.url, **settings)
