"""The pinned agents: exact pins, an install that is whole or absent, and the words of a skip. No network is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.all.vendors import found, install

NPM = """#!/bin/sh
while [ "$#" -gt 1 ]; do [ "$1" = --prefix ] && into=$2; shift; done
mkdir -p "$into/node_modules/agent"
echo "$1" >> "$into/../../asked"
[ -z "$NPM_FAILS" ] || { echo "npm error 404 no such package"; exit 1; }
printf '#!/bin/sh\\necho agent\\n' > "$into/node_modules/agent/run"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, one pin, and an npm that makes what the pin names."""
    npm = tmp_path / "path" / "npm"
    npm.parent.mkdir()
    npm.write_text(NPM)
    npm.chmod(0o755)
    pins = tmp_path / "pins.toml"
    pins.write_text('[agent]\nnpm = "agent@1.2.3"\nprogram = "node_modules/agent/run"\nlicence = "MIT"\n')
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")
    monkeypatch.setattr(found, "PINS", pins)
    monkeypatch.setattr(found, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_every_pin_is_exact() -> None:
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", found.version(pin)) for pin in found.pins().values())


def test_an_agent_is_installed_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main(["agent"]) == 0
    assert found.vendor("agent").startswith(str(cache))
    assert install.main([]) == 0
    assert "there already" in capsys.readouterr().out
    assert (cache / "asked").read_text() == "agent@1.2.3\n"


def test_a_failed_install_leaves_nothing_and_says_why(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPM_FAILS", "1")
    assert install.main(["agent"]) == 1
    assert "npm error 404" in capsys.readouterr().out
    assert not found.installed("agent")
    assert [one.name for one in (cache / "agent").iterdir() if one.is_dir()] == []


def test_an_agent_that_is_absent_skips_the_test_with_the_command_that_installs_it(cache: Path) -> None:
    with pytest.raises(
        pytest.skip.Exception, match=r"^vendors: agent not installed \(python3 xtask.py vendors agent\)$"
    ):
        found.vendor("agent")
