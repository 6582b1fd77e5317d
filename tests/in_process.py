"""One command of ours in the process of the tests, as `python -m backplane` does it in one of its own.

A new process takes half a second on a busy machine, and the command itself a tenth of that. What is about the process
(its signals, its exit, what it imports) starts a real one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from backplane.cli import main


def in_process(
    *words: str | Path, cwd: Path, stdin: str | bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Do one command in this folder, with these variables instead of our own; its exit code and what it wrote."""
    command = [str(word) for word in words]
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        mock.patch.dict(os.environ, env or {}, clear=env is not None),
    ):
        given.write(stdin.encode() if isinstance(stdin, str) else stdin)
        given.seek(0)
        with contextlib.chdir(cwd), at(0, given.fileno()), at(1, out.fileno()), at(2, err.fileno()):
            code = main(command)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *texts)


@contextlib.contextmanager
def at(number: int, other: int) -> Iterator[None]:
    """Let a standard descriptor be another one meanwhile."""
    kept = os.dup(number)
    os.dup2(other, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
