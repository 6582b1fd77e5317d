"""Versions of agents' programs, by the npm package that each lies in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backplane.cli.doctor import examine
from backplane.config import BackendSettings, Settings
from backplane.runtime import readiness
from backplane.runtime.readiness import is_older, version_at


@pytest.mark.parametrize(
    ("version", "oldest", "older"),
    [("2.1.197", "2.1.332", True), ("2.1.332", "2.1.332", False), ("2.2.0", "2.1.332", False),
     ("2.1.332-beta.1", "2.1.332", False), ("10.0", "2.1.332", False), ("2.1", "2.1.332", True)],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(version: str, oldest: str, older: bool) -> None:
    assert is_older(version, oldest) is older


def installed(folder: Path, version: str | None) -> Path:
    """Install a program as npm does: a link to a file below its package."""
    package = folder / "lib" / "node_modules" / "@anthropic-ai" / "claude-code"
    (package / "bin").mkdir(parents=True)
    if version is not None:
        (package / "package.json").write_text(json.dumps({"name": "x", "version": version}))
    program = package / "bin" / "claude.exe"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    link = folder / "claude"
    link.symlink_to(program)
    return link


@pytest.mark.parametrize("version", ["2.1.197", "2.1.330", "2.1.332", "3.0.0", None])
def test_an_agent_that_is_too_old_is_named_with_the_node_it_wants(tmp_path: Path, version: str | None) -> None:
    link = installed(tmp_path, version)
    assert version_at(str(link)) == version
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path), "ANTHROPIC_API_KEY": "k" * 20}
    settings = Settings(backends={"mine": BackendSettings(host="claude", options={"program": str(link)})})
    (status,) = [one for one in readiness.known(settings, environ) if one.id == "mine"]
    file = tmp_path / "backplane.toml"
    file.write_text(f'[backends.mine]\nhost = "claude"\noptions = {{ program = "{link}" }}\n')
    (told,) = [one for one in examine(environ, tmp_path, file) if one.name == "backend mine"]
    is_old = version in ("2.1.197", "2.1.330")
    assert ("2.1.332" in status.fix and "Node 22" in status.fix) == is_old
    assert ("older than 2.1.332" in told.fix and "Node 22" in told.fix) == is_old
    assert (told.state == "ok") == (not is_old)
