"""The README and the guide promise nothing that was not run: their commands run here, and the output is compared.

In a `console` block a line that begins with `$ ` is a command; what follows is its output, `…` standing for
anything within a line, or for any lines when alone. Python blocks are run as programs. A `toml` block of the README
is the `backplane.toml` of the commands after it. Commands in `sh` blocks need an agent or a service: the README's run
with the backend `mock`, the guide's are only parsed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backplane import config
from backplane.cli import COMMANDS, GROUPS
from backplane.cli.command import Parser, load
from backplane.runtime import hooks, readiness
from backplane.testing import ModelServer
from backplane.upstream.presets import PRESETS, read_options
from bench import table as bench

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = {path.name: path for path in (README, *GUIDE)}
TEXTS = {".py", ".md", ".toml", ".json", ".mjs", ".go", ".sh", ".java", ".yml"}
README_LINES_MAX = 160
SECONDS_MAX = 60


def blocks(language: str, page: str = "") -> list[str]:
    """Return the blocks of one page, or of all pages."""
    return [
        block
        for name, path in PAGES.items()
        for found, block in all_blocks(path)
        if found == language and page in ("", name)
    ]


def all_blocks(path: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text("utf-8"), re.S | re.M)


def shell_commands(block: str) -> list[str]:
    """Return the commands of an `sh` block, each on one line."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


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
    """A small git repository with a bug, as the guide's reader would have one."""
    folder = tmp_path / "sample"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    identity = ["-c", "user.name=Reader", "-c", "user.email=reader@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True, timeout=SECONDS_MAX)
    return folder


def run(command: str, folder: Path, env: dict[str, str], *, must_work: bool = False) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert not must_work or done.returncode == 0, f"$ {command}\n{done.stderr}{done.stdout}"
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


def compare(block: str, folder: Path, env: dict[str, str]) -> int:
    """Run the commands of a `console` block and compare their output. Return how many there are."""
    found = list(steps(block))
    for command, expected in found:
        output = run(command, folder, env)
        assert as_pattern(expected).fullmatch(output), f"$ {command}\n{output}\n--- expected\n{expected}"
    return len(found)


@pytest.mark.timeout(300)
def test_every_block_of_the_readme_runs_in_order_in_an_empty_folder(tmp_path: Path, env: dict[str, str]) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    for language, block in all_blocks(README):
        match language:
            case "sh":
                for command in shell_commands(block):
                    if not command.startswith("pip install"):
                        run(command.replace("-b claude", "-b mock"), folder, env, must_work=True)
            case "console":
                assert compare(block, folder, env)
            case "toml":
                (folder / "backplane.toml").write_text(block)
            case "python":
                run(f"{sys.executable} - <<'END'\n{block}\nEND", folder, env, must_work=True)
            case _:
                pytest.fail(f"no way to run a block of {language}")


def test_the_readme_fits_on_two_screens() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= README_LINES_MAX


def test_the_first_program_of_the_readme_prints_the_outcome(sample: Path, env: dict[str, str]) -> None:
    output = run(f"{sys.executable} - <<'END'\n{blocks('python', 'README.md')[0]}\nEND", sample, env)
    assert re.search(r"^complete [0-9a-f]{64}$", output, re.M), output


def test_the_review_of_the_readme_has_a_typed_answer(
    sample: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = next(block for block in blocks("python", "README.md") if "output=Review" in block)
    with ModelServer([{"text": '{"ok": false, "remarks": ["add() subtracts"]}'}]) as server:
        options = f'protocol = "openai_compatible", base_url = "{server.base_url("openai_compatible")}", model = "m"'
        (sample / "backplane.toml").write_text(f'[backends.mine]\nhost = "api"\noptions = {{ {options} }}\n')
        output = run(f"{sys.executable} - <<'END'\n{program}\nprint(review('mine'))\nEND", sample, env)
    assert "Review(ok=False, remarks=['add() subtracts'])" in output


FIVE_TURNS: list[list[dict[str, Any]]] = [
    [{"text": "Hello."}],
    [{"text": "Hello."}],
    [{"text": '{"ok": true}'}],
    [{"calls": [{"name": "mcp__functions__price", "input": {"article": "pump"}}]}, {"text": "It is 129."}],
    [{"calls": [{"name": "bash", "input": {"command": "true"}}]}, {"text": "They pass."}],
]
FIVE_OUTPUTS = ["^Hello.$", "AssistantMessage.*Hello", "^True$", "^It is 129.$", "^They pass.$"]


def test_five_programs_of_the_guide_do_what_they_say_in_31_lines(sample: Path, env: dict[str, str]) -> None:
    programs = blocks("python", "python.md")[:5]
    assert sum(len(list(filter(None, program.splitlines()))) for program in programs) <= 31
    for program, turns, expected in zip(programs, FIVE_TURNS, FIVE_OUTPUTS, strict=True):
        with ModelServer(turns) as server:
            options = (
                f'protocol = "openai_compatible", base_url = "{server.base_url("openai_compatible")}", model = "m"'
            )
            (sample / "backplane.toml").write_text(f'[backends.claude]\nhost = "api"\noptions = {{ {options} }}\n')
            output = run(f"{sys.executable} - <<'END'\n{program}\nEND", sample, env, must_work=True)
        assert re.search(expected, output, re.M), output
        asked = [message for request in server.requests for message in request.body.get("messages", ())]
        assert any("129.0" in str(message) for message in asked) == ("price(" in program)


def test_the_event_stream_of_the_guide_ends_with_a_receipt(sample: Path, env: dict[str, str]) -> None:
    program = next(block for block in blocks("python", "python.md") if "run.receipt.outcome" in block)
    output = run(f"{sys.executable} - <<'END'\n{program}\nEND", sample, env)
    assert re.search(r"^(complete|failed) [0-9a-f]{64}$", output, re.M), output


def test_the_many_runs_of_the_guide_all_end(sample: Path, env: dict[str, str]) -> None:
    program = next(block for block in blocks("python", "python.md") if "create_task_group" in block)
    output = run(f"{sys.executable} - <<'END'\n{program}\nEND", sample, env)
    assert {"echo one complete", "echo two complete"} <= set(output.splitlines()), output


def test_the_session_of_the_guide_answers_twice(sample: Path, env: dict[str, str]) -> None:
    program = next(block for block in blocks("python", "conversations.md") if "ProviderRegistry" in block)
    output = run(f"{sys.executable} - <<'END'\n{program}\nEND", sample, env)
    assert re.search(r"^hello$", output, re.M), output
    assert re.search(r"end_turn None \(.*dropped: history", output), output


@pytest.mark.parametrize("page", [name for name in PAGES if blocks("toml", name)])
def test_every_configuration_is_one(page: str, tmp_path: Path) -> None:
    for block in blocks("toml", page):
        settings = config.parse(block.encode(), source=page, folder=tmp_path)
        hooks.configured(settings.hooks)
        known = {status.id: status for status in readiness.known(settings, dict(os.environ))}
        assert set(settings.backends) <= set(known)
        assert settings.default_backend is None or settings.default_backend in known
        for name, backend in settings.backends.items():
            if backend.host == "api":
                read_options(backend.options, name)


def test_the_guide_names_every_preset() -> None:
    page = PAGES["agents.md"].read_text("utf-8")
    assert [name for name in PRESETS if f"`{name}`" not in page] == []


def test_the_model_of_the_guides_configuration_does_an_order(sample: Path, env: dict[str, str]) -> None:
    block = next(block for block in blocks("toml") if "backends.mine" in block)
    call = {"name": "edit_file", "input": {"path": "calc.py", "old": "a - b", "new": "a + b"}}
    with ModelServer([{"calls": [call]}, {"text": "add() adds."}]) as server:
        text, count = re.subn(r"http://127\.0\.0\.1:9000/v1", server.base_url("openai_compatible"), block)
        assert count == 1
        (sample / "backplane.toml").write_text(text)
        output = run("backplane run --backend mine 'mend add'", sample, env)
    assert "file: calc.py  edited" in output
    assert re.search(r"^complete after .* 40 tokens in, 20 tokens out, \$", output, re.M), output


def test_the_scripted_model_of_the_guide_answers_as_it_says() -> None:
    exec(next(block for block in blocks("python") if "ModelServer(" in block), {})


def test_the_comparison_of_the_readme_is_what_the_bench_demands() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (\d+) times less \|$", README.read_text("utf-8"), re.M))
    gates = {title: str(gate) for _, _, title, gate, _ in bench.PEER_STREAMS if title in rows}
    assert rows == gates
    assert len(rows) == 3


def calls(text: str) -> Iterator[list[str]]:
    """Yield the words after each `backplane` of a line of shell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in (*lexer, ";"):
        if word[0] in "&|;<>":
            if words[:1] == ["backplane"]:
                yield words[1:]
            words = []
        else:
            words.append(word)


@pytest.mark.parametrize("page", [name for name in PAGES if blocks("sh", name)])
def test_every_command_in_a_block_of_shell_can_be_parsed(page: str) -> None:
    found = [words for block in blocks("sh", page) for line in shell_commands(block) for words in calls(line)]
    for name, *arguments in found:
        if name in GROUPS:
            name, arguments = f"{name} {arguments[0]}", arguments[1:]
        parsed: Any = Parser(name, load(name)).parse(arguments)
        assert parsed is not None
    assert found


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_command_that_a_page_names_is_there(page: str) -> None:
    text = PAGES[page].read_text("utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = PAGES[page].parent / path if path else PAGES[page]
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.M) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, target
    for name in re.findall(r"`backplane ([a-z]+)", text):
        assert name in {known.partition(" ")[0] for known in (*COMMANDS, "help")}, name


def test_no_text_installs_the_package_of_that_name_from_the_index() -> None:
    """The name on the public index belongs to another project: hints name the checkout or the wheel."""
    folders = ("backplane", "hosts", "contracts", "docs", "schemas", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    wrong = re.compile(r"""(pip|uv|pipx)( tool)? install [^\n]*?(?<![\w./-])["']?backplane(\[|["'\s]|$)""", re.M)
    assert [str(path) for path in (README, *files) if wrong.search(path.read_text("utf-8"))] == []
