"""What every command prints for programs, held against the schema that its help names."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest

from backplane.cli import COMMANDS
from backplane.cli.command import Parser, load
from backplane.schemas import build
from backplane.schemas.build import load_schema
from backplane.testing import ModelServer, Turn
from tests.gateway.ground import backend, gateway
from tests.gateway.test_gateway import CHAT, said
from tests.in_process import in_process
from tests.queues import needs_queue

MOCK = ("--backend", "mock", "--param")
WRITES = 'mock.scenario=[{"write": {"path": "b.txt", "content": "x"}}]'
CRASHES = 'mock.scenario=[{"exit": 7}]'

PRINTED: dict[str, list[tuple[str, ...]]] = {
    "backends": [
        ("backends", "--json"),
        ("backends", "--json", "--probe", "mine"),
    ],
    "run": [
        ("run", "task", *MOCK, WRITES, "--json"),
        ("run", "task", *MOCK, CRASHES, "--json"),
        ("run", "task", "-b", "mock", "--dry-run", "--json"),
    ],
    "cost": [("cost", "--json")],
    "compare": [("compare", "true", "-b", "shell", "-b", "mock", "--check", "true", "--json")],
    "runs": [("runs", "--json"), ("runs", "--gateway", "--json")],
    "show": [("show", "RUN", "--json"), ("show", "EXCHANGE", "--json")],
    "why": [("why", "RUN", "--json")],
    "policy test": [("policy", "test", "strict", "RUN", "--json")],
    "queue list": [("queue", "list", "--json")],
    "queue show": [("queue", "show", "ORDER", "--json")],
    "queue status": [("queue", "status", "--json")],
    "queue limit": [("queue", "limit", "--json", "--rate", "3/2")],
    "receipts verify": [("receipts", "verify", "--json"), ("receipts", "verify", "--json", "RUN")],
    "receipts audit": [("receipts", "audit", "RUN", "--json")],
    "receipts show": [("receipts", "show", "RUN", "--json")],
    "sessions list": [("sessions", "list", "--json")],
    "sessions show": [("sessions", "show", "last", "--json")],
    "rewind": [("rewind", "RUN", "--json")],
    "conform": [("conform", "--json", "--", "false")],
    "version": [("version", "--json")],
    "doctor": [("doctor", "--json")],
}
"""Calls of every command that has `--json`, which print each of its shapes.

RUN is a run with a checkpoint, EXCHANGE an exchange of the gateway, ORDER an order that waits in a queue.
"""

AGENT = "#!/bin/sh\nexit 3\n"
CONFIGURATION = (
    '[backends.mine]\nhost = "claude"\noptions = { program = "./agent" }\n[backends.routed]\ncommand = ["true"]\n'
)


@functools.cache
def promised() -> dict[str, list[str]]:
    """Command → the schemas that the help of its `--json` names."""
    found = {}
    for name in COMMANDS:
        for action in Parser(name, load(name))._actions:
            if "--json" in action.option_strings:
                found[name] = str(action.help).partition("schema: ")[2].rstrip(")").split(", ")
    return found


class Work(NamedTuple):
    """A folder with a backend whose agent can be tried, and ends at once; its state; and what that holds."""

    folder: Path
    environ: dict[str, str]
    named: dict[str, str]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, user_settings: Path) -> Work:
    """A state folder with a run, a session and, where there is a queue, an order that waits; for all commands."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "agent").write_text(AGENT)
    (folder / "agent").chmod(0o755)
    (folder / "backplane.toml").write_text(CONFIGURATION.replace("./agent", str(folder / "agent")))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BACKPLANE_")}
    environ |= {"BACKPLANE_HOME": str(tmp_path_factory.mktemp("state")), "XDG_CONFIG_HOME": str(user_settings)}
    named: dict[str, str] = {}
    work = Work(folder, environ, named)
    printed(work, "run", "task", *MOCK, WRITES, "--checkpoints")
    (line,), _ = printed(work, "runs", "--json")
    named["RUN"] = str(json.loads(line)["run_id"])
    printed(work, "chat", "--backend", "shell", stdin=b"echo hello\n")
    home = Path(environ["BACKPLANE_HOME"])
    with ModelServer(Turn(text="hi")) as server, gateway({"a": backend(server, CHAT)}, {"m": "a"}, home) as gate:
        assert said(gate)[0] == 200
        named["EXCHANGE"] = gate.ends[-1].id
    if importlib.util.find_spec("dbos") is not None:
        ((order_id,), _) = printed(work, "queue", "submit", "task", "--backend", "mock")
        named["ORDER"] = order_id.decode()
    return work


def printed(work: Work, *words: str, stdin: bytes = b"") -> tuple[list[bytes], list[bytes]]:
    """The lines that one command writes to stdout and to stderr."""
    done = in_process(*words, cwd=work.folder, env=work.environ, stdin=stdin)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.encode().splitlines(), done.stderr.encode().splitlines()


def fits(name: str, line: bytes) -> bool:
    """Whether a line is of this shape and has its members, all of them, in their order and no others."""
    document, schema = json.loads(line), json.loads(load_schema(name))
    if any(True for _ in jsonschema.Draft202012Validator(schema).iter_errors(document)):
        return False
    return not name.startswith("cli_") or list(document) == list(schema["properties"]) == schema["required"]


def test_every_command_with_json_names_schemas_that_there_are_and_is_called_here() -> None:
    found = promised()
    assert found.keys() == PRINTED.keys()
    assert {name for names in found.values() for name in names} <= set(build.names())


@pytest.mark.parametrize("command", PRINTED)
def test_what_a_command_prints_fits_a_schema_that_its_help_names(command: str, work: Work) -> None:
    if command.startswith("queue"):
        needs_queue()
    seen = set()
    for words in PRINTED[command]:
        lines, complaints = printed(work, *(work.named.get(word, word) for word in words))
        assert lines, complaints
        for line in lines:
            of = [name for name in promised()[command] if fits(name, line)]
            assert len(of) == 1, (of, line)
            seen.update(of)
    assert seen == set(promised()[command])


def test_losses_of_a_translation_fit_their_schema(work: Work) -> None:
    request = b'{"model":"m","max_tokens":3,"top_k":4,"messages":[{"role":"user","content":"hi"}]}'
    _, lines = printed(work, "translate", "--from", "claude", "--to", "openai", stdin=request)
    assert lines
    assert all(fits("cli_translate_loss", line) for line in lines)


def test_the_head_of_the_chain_fits_its_schema(work: Work) -> None:
    printed(work, "receipts", "verify", "--save-checkpoint", "head.json")
    assert fits("cli_receipts_checkpoint", (work.folder / "head.json").read_bytes())


def test_every_schema_of_what_is_printed_is_named_by_a_command() -> None:
    told: set[str] = {name for names in promised().values() for name in names}
    told |= {"cli_translate_loss", "cli_receipts_checkpoint", "cli_route"}
    assert {name for name in build.names() if name.startswith("cli_")} <= told
