"""A command whose words are kept until its end: run by real shells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from backplane.agents.codex.hold import HELD_BYTES_MAX, held, unheld

ENDS_S = 20
SHELLS = pytest.mark.parametrize("shell", ["sh", "bash"])


def run(shell: str, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(folder)}
    words = [shell, "-c", held(command)]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=ENDS_S, check=False)


@SHELLS
@pytest.mark.needs("bash")
def test_a_held_command_says_the_same_and_ends_the_same(shell: str, tmp_path: Path) -> None:
    command = "echo 'a  b'; echo c >&2; exit 3"
    ended = run(shell, command, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "a  b\nc\n", "")
    assert unheld(held(command)) == command
    assert list(tmp_path.iterdir()) == []


@SHELLS
@pytest.mark.needs("bash")
def test_a_held_command_that_says_too_much_loses_what_it_said_first(shell: str, tmp_path: Path) -> None:
    # It goes on when what it said has been cut: its own words are the file behind its second descriptor.
    waits = "while [ $(wc -c </proc/self/fd/2) -gt 1000 ]; do sleep 0.02; done"
    ended = run(shell, f"head -c {HELD_BYTES_MAX + 1} /dev/zero; {waits}; echo the end; exit 4", tmp_path)
    assert ended.returncode == 4
    assert ended.stdout == "[over 64 MiB: what the command said first is left out]\nthe end\n"
    assert list(tmp_path.iterdir()) == []
