"""The README promises nothing that was not run: its commands are run here and their output compared.

In a `console` block a line that begins with `$ ` is a command; what follows is its output, `…` standing for
anything within a line, or for any lines when alone. Python blocks are run as programs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backplane import config
from backplane.cli import COMMANDS
from backplane.runtime import backends, hooks
from backplane.testing import ModelServer
from backplane.upstream.presets import PRESETS, read_options
from bench import table as bench

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SECONDS_MAX = 60


def blocks(language: str) -> list[str]:
    return [block for found, block in all_blocks() if found == language]


def all_blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", README, re.S | re.M)


def steps(block: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def as_pattern(expected: str) -> re.Pattern[str]:
    lines = [
        r"(?:[^\n]*\n)*?" if line == "…" else ".*?".join(map(re.escape, line.split("…"))) + r"[^\S\n]*\n"
        for line in expected.splitlines()
    ]
    return re.compile("".join(lines))


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A small git repository with a bug, as the README's reader would have one."""
    folder = tmp_path / "sample"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    identity = ["-c", "user.name=Reader", "-c", "user.email=reader@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True, timeout=SECONDS_MAX)
    return folder


def run(command: str, folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    # Where there is no bubblewrap, a run begins with this line.
    return re.sub(r"^.* not held: bubblewrap is unusable .*\n", "", done.stderr, flags=re.M) + done.stdout


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A reader's environment at the first try: no state folder yet, and nothing in the home folder."""
    home, scripts = tmp_path / "reader", str(Path(sys.executable).parent)
    home.mkdir()
    nothing = [name for name in os.environ if name.startswith(("BACKPLANE_", "XDG_"))]
    kept = {name: value for name, value in os.environ.items() if name not in nothing}
    return {**kept, "HOME": str(home), "PATH": f"{scripts}:{os.environ['PATH']}"}


@pytest.mark.timeout(300)
def test_every_command_of_the_readme_prints_what_it_says(sample: Path, env: dict[str, str]) -> None:
    checked = 0
    for language, block in all_blocks():
        if "main(Host(" in block:
            (sample / "hello.py").write_text(block)
        for command, expected in steps(block) if language == "console" else ():
            output = run(command, sample, env)
            assert as_pattern(expected).fullmatch(output), f"$ {command}\n{output}\n--- expected\n{expected}"
            checked += 1
    assert checked >= 8


def test_the_python_program_of_the_readme_runs_an_order(sample: Path, env: dict[str, str]) -> None:
    program = next(block for block in blocks("python") if "backplane.start" in block)
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    output = run(f"{sys.executable} -c '{program}'", sample, env)
    assert re.search(r"^(complete|failed) [0-9a-f]{64}$", output, re.M), output


def test_the_session_of_the_readme_answers_twice(sample: Path, env: dict[str, str]) -> None:
    program = next(block for block in blocks("python") if "ProviderRegistry" in block)
    output = run(f"{sys.executable} - <<'END'\n{program}\nEND", sample, env)
    assert re.search(r"end_turn None \(.*dropped: history", output), output


def test_the_host_of_the_readme_answers_an_order(sample: Path, env: dict[str, str], tmp_path: Path) -> None:
    host = tmp_path / "hello.py"
    host.write_text(next(block for block in blocks("python") if "main(Host(" in block))
    output = run(f"backplane run --sidecar '{sys.executable} {host}' 'say hi'", sample, env)
    assert "I was asked: say hi" in output
    assert "complete after" in output


def test_every_configuration_of_the_readme_is_one(tmp_path: Path) -> None:
    found = [config.parse(block.encode(), source="README", folder=tmp_path) for block in blocks("toml")]
    assert len(found) == 2
    for settings in found:
        hooks.configured(settings.hooks)
        known = {status.id: status for status in backends.known(settings, dict(os.environ))}
        assert set(settings.backends) < set(known)
        assert settings.default_backend is None or settings.default_backend in known
        for name, backend in settings.backends.items():
            if backend.host == "api":
                read_options(backend.options, name)
    assert all(f"`{name}`" in README for name in PRESETS)


def test_the_model_of_the_readmes_configuration_does_an_order(sample: Path, env: dict[str, str]) -> None:
    block = next(block for block in blocks("toml") if "backends.mine" in block)
    call = {"name": "edit_file", "input": {"path": "calc.py", "old": "a - b", "new": "a + b"}}
    with ModelServer([{"calls": [call]}, {"text": "add() adds."}]) as server:
        text, count = re.subn(r"http://127\.0\.0\.1:9000/v1", server.base_url("openai_compatible"), block)
        assert count == 1
        (sample / "backplane.toml").write_text(text)
        output = run("backplane run --backend mine 'mend add'", sample, env)
    assert "file: calc.py  edited" in output
    assert re.search(r"^complete after .* 40 tokens in, 20 tokens out, \$", output, re.M), output


def test_the_scripted_model_of_the_readme_answers_as_it_says() -> None:
    exec(next(block for block in blocks("python") if "ModelServer(" in block), {})


def test_the_comparison_of_the_readme_is_what_the_bench_demands() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (\d+) times less \|$", README, re.M))
    gates = {title: str(gate) for _, _, title, gate, _ in bench.PEER_STREAMS if title in rows}
    assert rows == gates
    assert len(rows) == 3


def test_every_file_and_command_that_the_readme_names_is_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text("utf-8"), re.M) if anchor else []
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings], target
    for name in re.findall(r"`backplane ([a-z]+)", README):
        assert name in (*COMMANDS, "help"), name
