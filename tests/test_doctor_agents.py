"""What `doctor` says of an agent: which login it has, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from backplane.cli.doctor import DoctorCheck, examine


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with the program `kimi` and nothing else of an agent."""
    for folder in ("bin", "home", "work"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "bin" / "kimi"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return {"PATH": path, "HOME": str(tmp_path / "home"), "BACKPLANE_HOME": str(tmp_path / "state")}


def told(environ: dict[str, str], folder: Path, configuration: str = "") -> DoctorCheck:
    (folder / "work" / "backplane.toml").write_text(configuration)
    found = {finding.name: finding for finding in examine(environ, folder / "work", None)}
    return found["backend kimi"]


def test_a_key_that_is_there_makes_it_ready(environ: dict[str, str], tmp_path: Path) -> None:
    found = told({**environ, "KIMI_API_KEY": "walrus"}, tmp_path)
    assert (found.state, "its key is in KIMI_API_KEY" in found.fact) == ("ok", True)
    assert "walrus" not in found.fact


@pytest.mark.parametrize("configured", [False, True])
def test_a_missing_key_is_a_lack_where_somebody_configured_the_agent(
    environ: dict[str, str], tmp_path: Path, configured: bool
) -> None:
    found = told(environ, tmp_path, '[backends.kimi]\nhost = "kimi"\n' if configured else "")
    assert (found.state, "KIMI_API_KEY" in found.fix) == ("missing" if configured else "note", True)


def test_a_login_of_ones_own_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    login = tmp_path / "home" / ".kimi" / "credentials"
    login.parent.mkdir()
    login.touch()
    found = told(environ, tmp_path)
    assert str(login) in found.fact
    assert "own_state = true" in found.fix


def test_a_key_in_the_configuration_counts(environ: dict[str, str], tmp_path: Path) -> None:
    configuration = '[backends.kimi]\nhost = "kimi"\nenv = { KIMI_API_KEY = "$MY_KEY" }\n'
    assert told({**environ, "MY_KEY": "x"}, tmp_path, configuration).state == "ok"
