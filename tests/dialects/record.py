"""Records what the real agents send: `python -m tests.dialects.record [AGENT …]`, then `tests.dialects.recorded`.

Every installed agent (`xtask.py vendors`) runs one turn with a tool against the scripted server on loopback; its
requests land in `.cache/recorded/`, which is not committed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backplane.testing import SIDE_TURNS, Call, ModelServer, Turn
from tests.all.vendors import found

FOLDER = found.ROOT / ".cache" / "recorded"
AGENT_S_MAX = 120
"""An agent that takes longer than its whole turn with a model on loopback hangs."""
PROMPT = "write a file"
MODEL = "scripted-model"

Launch = tuple[list[str], dict[str, str]]
"""Arguments after the program, and the environment that only this agent needs."""


def claude(server: ModelServer, home: Path) -> Launch:
    flags = ["-p", PROMPT, "--output-format", "stream-json", "--verbose", "--permission-mode", "acceptEdits"]
    return flags, {
        "CLAUDE_CONFIG_DIR": str(home), "ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "dummy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
    }  # fmt: skip


def codex(server: ModelServer, home: Path) -> Launch:
    base = server.base_url("openai_responses")
    provider = f'{{name = "Scripted", base_url = "{base}", env_key = "SCRIPTED_KEY", wire_api = "responses"}}'
    (home / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "scripted"\ncheck_for_update_on_startup = false\n'
        f"[analytics]\nenabled = false\n[model_providers]\nscripted = {provider}\n"
    )
    flags = ["exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access", PROMPT]
    return flags, {"CODEX_HOME": str(home), "SCRIPTED_KEY": "dummy"}


def gemini(server: ModelServer, home: Path) -> Launch:
    settings = {
        "general": {"enableAutoUpdate": False}, "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False}, "security": {"auth": {"selectedType": "gemini-api-key"}},
    }  # fmt: skip
    (home / ".gemini").mkdir()
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    flags = ["-p", PROMPT, "--output-format", "stream-json", "--approval-mode", "yolo", "-m", MODEL]
    return flags, {
        "GEMINI_API_KEY": "dummy", "GOOGLE_GEMINI_BASE_URL": server.url, "GEMINI_CLI_HOME": str(home),
        "GEMINI_CLI_TRUST_WORKSPACE": "true", "GEMINI_CLI_NO_RELAUNCH": "true",
    }  # fmt: skip


def opencode(server: ModelServer, home: Path) -> Launch:
    options = {"baseURL": server.base_url("openai_compatible"), "apiKey": "dummy"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "s", "options": options, "models": {MODEL: {"name": "m"}}}
    config = {"provider": {"s": provider}, "model": f"s/{MODEL}", "small_model": f"s/{MODEL}"}
    folders = {f"XDG_{name}_HOME": str(home / name) for name in ("DATA", "CONFIG", "STATE", "CACHE")}
    switches = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return ["run", "--format", "json", PROMPT], {"OPENCODE_CONFIG_CONTENT": json.dumps(config), **folders, **switches}


def qwen(server: ModelServer, home: Path) -> Launch:
    flags = ["-p", PROMPT, "--output-format", "stream-json", "--approval-mode", "yolo", "--auth-type", "openai"]
    base = server.base_url("openai_compatible")
    return flags, {"OPENAI_BASE_URL": base, "OPENAI_API_KEY": "dummy", "OPENAI_MODEL": MODEL}


AGENTS: dict[str, tuple[Callable[[ModelServer, Path], Launch], str, str]] = {
    "claude": (claude, "Write", "file_path"),
    "codex": (codex, "exec_command", "cmd"),
    "gemini": (gemini, "write_file", "file_path"),
    "opencode": (opencode, "write", "filePath"),
    "qwen": (qwen, "write_file", "file_path"),
}
"""Agent → how it is started, its own tool that the script calls, and that tool's first member."""


def record(name: str) -> int:
    """Run one agent through its script; return how many requests it sent."""
    launch, tool, member = AGENTS[name]
    with tempfile.TemporaryDirectory() as made:
        home, place = Path(made, "home"), Path(made, "work")
        home.mkdir()
        place.mkdir()
        asked: dict[str, Any] = {member: "true" if member == "cmd" else str(place / "a.txt"), "content": "hi\n"}
        calls = (Call(name=tool, input=asked),)
        with ModelServer([*SIDE_TURNS, Turn(text="I write.", calls=calls), Turn(text="All done.")]) as server:
            flags, own = launch(server, home)
            environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": made, **own}
            subprocess.run(
                [str(found.program(name)), *flags], env=environment, cwd=place, stdin=subprocess.DEVNULL,
                capture_output=True, timeout=AGENT_S_MAX, check=False,
            )  # fmt: skip
            sent = [{"method": one.method, "path": one.path, "body": one.body} for one in server.requests]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sent), encoding="utf-8")
    return len(sent)


def main(names: list[str]) -> int:
    """Record the named agents, else all that are installed."""
    for name in names or [one for one in AGENTS if found.installed(one)]:
        print(f"{name}: {record(name)} requests")
    print(f"judge them: python -m tests.dialects.recorded {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
