"""Stores as the vendors' own programs write them: a conversation of several turns held by each, without our hosts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from backplane.testing import SIDE_TURNS, Call, ModelServer, Turn
from tests.all.vendors.found import vendor
from tests.all.vendors.test_codex import adds

WAIT_S = 240.0
"""For one turn of an agent of 600 MB on a machine with much other work: two minutes were seen."""
KEY = "scripted-key-1"


@dataclass(frozen=True)
class Vendor:
    """How a program is asked, where its files lie, and how its model calls tools."""

    name: str
    env: Callable[[Path, ModelServer], dict[str, str]]
    """Its folder, below the test's own, and the model's address."""
    first: Callable[[str], list[str]]
    """Arguments that begin a conversation with these words."""
    more: Callable[[str, str], list[str]]
    """Arguments that go on with one: words, id."""
    writes: Callable[[str, str], Call]
    runs: Callable[[str], Call]


def _claude(home: Path, server: ModelServer) -> dict[str, str]:
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER"), "1")
    return {
        "CLAUDE_CONFIG_DIR": str(home),
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": KEY,
        "CLAUDE_CODE_MAX_RETRIES": "1",
        **quiet,
    }


def _codex(home: Path, server: ModelServer) -> dict[str, str]:
    (home / "config.toml").write_text(
        'model = "gpt-5.5"\nmodel_provider = "scripted"\ncheck_for_update_on_startup = false\n'
        "[analytics]\nenabled = false\n[features]\napps = false\nplugins = false\n"
        f'[model_providers.scripted]\nname = "Scripted"\nbase_url = "{server.url}/v1"\nenv_key = "SCRIPTED_KEY"\n'
        'wire_api = "responses"\nrequest_max_retries = 1\nstream_max_retries = 1\n'
    )
    return {"CODEX_HOME": str(home), "SCRIPTED_KEY": KEY}


_JSON = ("--output-format", "stream-json")
_CLAUDE = (*_JSON, "--verbose", "--permission-mode", "acceptEdits", "--allowedTools", "Bash", "Write")

VENDORS = {
    one.name: one
    for one in (
        Vendor(
            "claude",
            _claude,
            lambda words: ["-p", words, *_CLAUDE],
            lambda words, id: ["-p", words, "--resume", id, *_CLAUDE],
            lambda path, content: Call(name="Write", input={"file_path": path, "content": content}),
            lambda command: Call(name="Bash", input={"command": command, "description": "a step"}),
        ),
        Vendor(
            "codex",
            _codex,
            lambda words: ["exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access", words],
            lambda words, id: ["exec", "resume", id, "--json", "--skip-git-repo-check", words],
            lambda path, content: adds(Path(path).name, content).calls[0],
            lambda command: Call(name="exec_command", input={"cmd": command}),
        ),
    )
}


class Store:
    """One vendor's folder, and a folder to work on."""

    def __init__(self, name: str, folder: Path) -> None:
        self.vendor, self.program = VENDORS[name], vendor(name)
        self.home, self.root = folder / f"{name}-home", folder / f"{name}-work"
        for made in (self.home, self.root):
            made.mkdir()

    def turn(self, server: ModelServer, arguments: Sequence[str]) -> list[str]:
        """Have the program do one turn; its lines."""
        env = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            "TMPDIR": str(self.home.parent),
            **self.vendor.env(self.home, server),
        }
        done = subprocess.run(
            [self.program, *arguments],
            cwd=self.root, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout.splitlines()

    def conversation(self) -> list[Turn]:
        """What the model says: thinking, a file written, two commands at once of which one fails, an answer."""
        path = str(self.root / "new.txt")
        return [
            Turn(reasoning="think first", text="I write it.", calls=(self.vendor.writes(path, "made\n"),)),
            Turn(calls=(self.vendor.runs("cat new.txt; exit 3"), self.vendor.runs("echo second"))),
            Turn(text="The word is noted."),
        ]


def environ_of(vendor: Vendor, home: Path) -> dict[str, str]:
    """The variable that says where its store is."""
    return {{"claude": "CLAUDE_CONFIG_DIR", "codex": "CODEX_HOME"}[vendor.name]: str(home)}


def script(turns: Sequence[Turn]) -> list[Turn]:
    return [*SIDE_TURNS, *turns]
