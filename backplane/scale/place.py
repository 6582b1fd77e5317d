"""Where a queue is: checked, opened and loaded later; and the orders in it by the beginning of an id."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backplane import config
from backplane.errors import ConfigError, install_hint
from backplane.scale.engine import unknown_order

if TYPE_CHECKING:
    from backplane.scale.content import Contents
    from backplane.scale.durable import DurableEngine

LISTED_MAX: Final = 10_000
"""Most orders that are looked through; more take a day."""
ID_CHARS_MIN: Final = 4
"""Fewest characters of an id's beginning that name an order."""
ID_CHARS: Final = 36
"""Characters of a whole id."""


def _invalid(fact: str, hint: str) -> ConfigError:
    return ConfigError("config_invalid", fact, hint=hint)


class QueuePlace:
    """Where a queue is: checked when made, opened and loaded later.

    Args:
        engine: URL of its engine; None is the file in this user's state folder.
        content: where its contents lie, a folder or a URL; None is beside the file.
        may_make: a file that is not there is made; a folder above it never is.

    Raises:
        ConfigError: `config_invalid`: no such engine or place; the extra is missing.
    """

    def __init__(self, engine: str | None, content: str | None = None, *, may_make: bool = True) -> None:
        if find_spec("dbos") is None:
            raise _invalid("the queue's engine is not installed (dbos)", install_hint("scale"))
        self.url = engine if engine is not None else f"sqlite:///{config.home(os.environ) / 'queue.sqlite'}"
        self.content = content
        path = self.url.removeprefix("sqlite:///") if self.url.startswith("sqlite:///") else None
        self._file = Path(path.partition("?")[0]) if path is not None else None
        if path is None and not self.url.startswith("postgresql://"):
            fact = f"{self.url.partition(':')[0][:40]!r} is no kind of engine"
            raise _invalid(fact, "sqlite:///FILE, or postgresql://USER@HOST/DATABASE")
        if path is not None and not path.strip("/"):
            raise _invalid(f"{self.url!r} names no file", "sqlite:///FILE")
        folder = Path(content) if content is not None and "://" not in content else None
        if folder is not None and not folder.exists():
            _require_folder(folder.parent if may_make else folder, "--content")
        self.is_new = self._file is not None and not self._file.exists()
        if self._file is not None and self.is_new:
            if may_make:
                _require_folder(self._file.parent, "--engine")
            elif engine is not None:
                raise self.none_there()

    def none_there(self) -> ConfigError:
        """Return the error for a missing queue."""
        fact = f"there is no queue at {self._file}"
        return _invalid(fact, "see --engine; `backplane queue submit`, `worker` and `limit` make a new one")

    def contents(self) -> Contents:
        """The content store. Raises ConfigError `config_invalid`: none is named, or there is no such place."""
        from backplane.scale.content import open_contents

        if self.content is None and self._file is None:
            fact = "an engine on a server needs a place for contents that all machines share"
            raise _invalid(fact, "--content DIR or URL, the same for submitters and workers")
        beside = f"{self.url.removeprefix('sqlite:///')}.content"
        return open_contents(self.content if self.content is not None else beside, os.environ)

    @property
    def file(self) -> Path | None:
        """The file of the queue, if it is one."""
        return self._file

    def open(self, **settings: float) -> DurableEngine:
        """Load the engine and open it; takes about a second.

        Raises:
            ConfigError: `config_invalid`: this Python's SQLite is too old for it.
        """
        from backplane.scale.durable import DurableEngine

        return DurableEngine(self.url, **settings)


def _require_folder(folder: Path, option: str) -> None:
    if not folder.is_dir():
        raise _invalid(f"there is no folder {folder}", f"see {option}, or make the folder")


async def order_id(engine: DurableEngine, name: str) -> str:
    """Return the id that begins so.

    Raises:
        ConfigError: `config_invalid`, no order's does, or several do.
    """
    found = [name] if len(name) == ID_CHARS else await ids(engine, name)
    if len(found) > 1:
        raise _invalid(f"the ids of {len(found)} orders begin with {name!r}", "give more of it")
    if not found:
        raise unknown_order(name)
    return found[0]


async def ids(engine: DurableEngine, name: str) -> list[str]:
    """The ids that begin so, of the newest `LISTED_MAX` orders; none where the name is too short to mean one."""
    if len(name) < ID_CHARS_MIN:
        return []
    return [one.order_id for one in await engine.list(limit=LISTED_MAX) if one.order_id.startswith(name)]
