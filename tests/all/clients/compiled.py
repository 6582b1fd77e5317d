"""Programs of the client tests, each compiled once from its sources into the checkout's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.peers import ROOT

BUILD_S_MAX = 100
CACHE = ROOT / ".cache"

Sources = Mapping[str, Path | str]
"""By their path in a folder, files and folders to copy or texts."""


def compiled(name: str, sources: Sources, *commands: Sequence[str]) -> Path:
    """The folder with these sources in which the commands were run; made anew where one of either has changed.

    Args:
        sources: what the folder has at first.
        commands: each with the compiler's full path, whose own change counts, too.
    """
    known = hashlib.sha256(repr((sorted(sources), commands)).encode())
    for words in commands:
        known.update(str(os.stat(words[0]).st_mtime_ns).encode())
    for _, source in sorted(sources.items()):
        known.update(b"\0")
        known.update(source.encode() if isinstance(source, str) else _content(source))
    cache = CACHE / f"{name}-{known.hexdigest()[:12]}"
    if not cache.exists():
        draft = cache.with_name(f"{cache.name}.{os.getpid()}")
        try:
            _make(draft, sources, commands)
            draft.replace(cache)
        except OSError:
            if not cache.exists():  # else another worker was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return cache


def _content(source: Path) -> bytes:
    if source.is_file():
        return source.read_bytes()
    return b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sorted(source.iterdir()))


def _make(draft: Path, sources: Sources, commands: Sequence[Sequence[str]]) -> None:
    for place, source in sources.items():
        path = draft / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, str):
            path.write_text(source)
        elif source.is_dir():
            shutil.copytree(source, path)
        else:
            shutil.copy(source, path)
    # Go's own cache has its standard library, which takes half a minute to compile.
    env = {"GOCACHE": str(CACHE / "go-build")} if not os.environ.get("HOME") else {}
    env |= os.environ | {"GOFLAGS": "-mod=mod", "GOWORK": "off"}
    for words in commands:
        made = subprocess.run(words, cwd=draft, env=env, capture_output=True, text=True, timeout=BUILD_S_MAX)
        assert made.returncode == 0, made.stdout + made.stderr
