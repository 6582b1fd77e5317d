"""The place of a queue, opened on demand."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backplane import config
from backplane.errors import ConfigError, install_hint
from backplane.scale.content import Contents, open_contents

if TYPE_CHECKING:
    from backplane.scale.durable import DurableEngine

LISTED_MAX: Final = 10_000
"""Orders in which an id is searched, the newest first."""


def _invalid(fact: str, hint: str) -> ConfigError:
    return ConfigError("config_invalid", fact, hint=hint)


class QueuePlace:
    """The place of a queue: it is checked at once, and opened by `open`.

    Args:
        engine: URL of the engine; None means the file in this user's state folder.
        content: folder or URL of the content store; None means a folder beside the file.
        may_make: create a missing file, but never its folder.

    Attributes:
        file: the file of the queue; None for a queue on a server.

    Raises:
        ConfigError: `config_invalid`: the engine or the place does not exist, or the extra is not installed.
    """

    def __init__(self, engine: str | None, content: str | None = None, *, may_make: bool = True) -> None:
        if find_spec("dbos") is None:
            raise _invalid("the queue's engine is not installed (dbos)", install_hint("scale"))
        self.url = engine if engine is not None else f"sqlite:///{config.home(os.environ) / 'queue.sqlite'}"
        self.content = content
        path = self.url.removeprefix("sqlite:///") if self.url.startswith("sqlite:///") else None
        self.file = Path(path.partition("?")[0]) if path is not None else None
        if path is None and not self.url.startswith("postgresql://"):
            fact = f"{self.url.partition(':')[0][:40]!r} is not a kind of engine"
            raise _invalid(fact, "give sqlite:///FILE, or postgresql://USER@HOST/DATABASE")
        if path is not None and not path.strip("/"):
            raise _invalid(f"{self.url!r} names no file", "give sqlite:///FILE")
        folder = Path(content) if content is not None and "://" not in content else None
        if folder is not None and not folder.exists():
            _require_folder(folder.parent if may_make else folder, "--content")
        self.is_new = self.file is not None and not self.file.exists()
        if self.file is not None and self.is_new:
            if may_make:
                _require_folder(self.file.parent, "--engine")
            elif engine is not None:
                raise self.none_there()

    def none_there(self) -> ConfigError:
        """Return the error for a missing queue."""
        fact = f"no queue at {self.file}"
        return _invalid(fact, "check --engine; `backplane queue submit`, `worker` and `limit` create a queue")

    def contents(self) -> Contents:
        """Open the content store. Raises ConfigError `config_invalid` if none is named, or it does not exist."""
        if self.content is None and self.file is None:
            fact = "a queue on a server needs a content store that all machines share"
            raise _invalid(fact, "give --content DIR or URL, the same for submitters and workers")
        beside = f"{self.url.removeprefix('sqlite:///')}.content"
        return open_contents(self.content if self.content is not None else beside)

    def open(self, **settings: float) -> DurableEngine:
        """Load the engine, which takes about a second. Raises ConfigError `config_invalid`: SQLite is too old."""
        from backplane.scale.durable import DurableEngine

        return DurableEngine(self.url, **settings)


def _require_folder(folder: Path, option: str) -> None:
    if not folder.is_dir():
        raise _invalid(f"no folder {folder}", f"correct {option}, or create the folder")
