"""Manners of the command: completion in real shells, near misses named, help by word, times in units."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backplane.cli import COMMANDS, GROUPS
from backplane.cli.completion import offered
from tests.in_process import in_process
from tests.peers import ROOT

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _backplane
printf '%s\\n' "${COMPREPLY[@]}"
"""


def cli(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return in_process(*words, cwd=cwd)


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("completion") / "backplane.bash"
    script.write_text(cli("completion", "bash").stdout)
    return script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ru"], {"run", "runs"}),
        (["run", "--mo"], {"--model"}),
        (["run", "--isolation", ""], {"required", "best_effort", "off"}),
        (["queue", "list", "--la"], {"--label"}),
        (["receipts", "ver"], {"verify"}),
        (["completion", "z"], {"zsh"}),
        (["help", "recei"], {"receipts"}),
        (["run", "--model", "runs", "--app"], {"--apply"}),
        (["explain", "backend_c"], {"backend_crashed", "backend_content_filtered", "backend_context_length"}),
    ],
)
def test_bash_offers_what_the_parsers_take(bash_script: Path, typed: list[str], offered: set[str]) -> None:
    assert completed(bash_script, *typed) == offered


def test_bash_offers_names_and_no_files(bash_script: Path, tmp_path: Path, backplane_home: Path) -> None:
    (tmp_path / "a-file").touch()
    assert cli("run", "-b", "shell", "true", cwd=tmp_path).returncode == 0
    found = completed(bash_script, "receipts", "show", "", cwd=tmp_path)
    assert "last" in found
    assert len(found) == 2
    assert {"shell", "claude"} <= completed(bash_script, "run", "-b", "", cwd=tmp_path)


def completed(script: Path, *typed: str, cwd: Path = ROOT) -> set[str]:
    """What bash offers for the last of these words."""
    program = str(Path(sys.executable).with_name("backplane"))
    command = ["bash", "-c", BASH, "bash", str(script), program, *typed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=cwd)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_valid(shell: str, tmp_path: Path) -> None:
    text = cli("completion", shell).stdout
    assert "backplane" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell}: not installed")
    (tmp_path / "script").write_text(text)
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, timeout=10, check=True)
    assert done.stderr == b""


def test_every_command_is_offered() -> None:
    first = set(offered([""]))
    assert {name.partition(" ")[0] for name in COMMANDS} <= first
    for group in GROUPS:
        assert {f"{group} {value}" for value in offered([group, ""])} <= COMMANDS.keys()


def test_help_takes_a_command(tmp_path: Path) -> None:
    assert cli("help").stdout == cli("--help").stdout
    assert cli("help", "run").stdout == cli("run", "--help").stdout
    assert cli("help", "receipts", "verify").stdout == cli("receipts", "verify", "--help").stdout
    assert cli("help", "nosuch").returncode == 2


def test_version_names_the_contract() -> None:
    told = json.loads(cli("version", "--json").stdout)
    assert told["contract"] == "abp/v0.1"
    assert cli("version").stdout == f"backplane {told['version']}  (contract abp/v0.1)\n"
