"""A project's own instructions reach a model behind the host `api`, and stand in the receipt."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from backplane.contract.events import Warned
from backplane.contract.work import PolicyProfile, RuntimeConfig
from backplane.runtime.instructions import BYTES_MAX
from backplane.testing import ModelServer, Turn
from tests.api_agent import everything, job, of, solve
from tests.peers import PLAIN, PYTHON, ROOT, Child
from tests.peers import run as sent
from tests.runs import backplane_of, ended

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    # What is tested here runs in a child with a loop of its own.
    return "asyncio"


def system_of(server: ModelServer) -> str:
    body: Any = server.requests[0].body
    assert body["messages"][0]["role"] in ("system", "developer")
    return str(body["messages"][0]["content"])


def wrote(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder in a repository, in a folder with instructions that are no part of it."""
    wrote(tmp_path / "AGENTS.md", "outside of the repository\n")
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    wrote(tmp_path / "repo/AGENTS.md", "the farthest words\n")
    wrote(tmp_path / "repo/part/CLAUDE.md", "the middle words\n")
    wrote(tmp_path / "repo/part/work/AGENTS.md", "the nearest words\n")
    wrote(tmp_path / "repo/part/work/CLAUDE.md", "the other name\n")
    return tmp_path / "repo/part/work"


@pytest.mark.parametrize("mode", ["staged", "pass_through"])
async def test_the_files_up_to_the_repositorys_root_are_given_in_order_and_named(
    mode: str, project: Path, backplane_home: Path
) -> None:
    vendor = {"api": {"system": "rules of the order"}, "abp": {"system": "more rules"}}
    work = job(project, "the task", mode=mode, config=RuntimeConfig(vendor=vendor))
    run, _, server = await solve(backplane_home, [Turn(text="ok")], work)
    assert ended(run)[0] == "complete"
    system = system_of(server)
    parts = ("rules of the order", "more rules", "the farthest words", "the middle words", "the nearest words")
    places = [system.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert "outside of the repository" not in system
    assert "the other name" not in system
    data = b"the middle words\n"
    rows = backplane_of(run)["project_instructions"]
    assert [row["path"] for row in rows] == ["../../AGENTS.md", "../CLAUDE.md", "AGENTS.md"]
    assert rows[1] == {"path": "../CLAUDE.md", "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


async def test_an_order_turns_them_off(project: Path, backplane_home: Path) -> None:
    work = job(project, config=RuntimeConfig(vendor={"abp": {"project_instructions": False}}))
    run, _, server = await solve(backplane_home, [Turn(text="ok")], work)
    assert "the nearest words" not in system_of(server)
    assert "project_instructions" not in backplane_of(run)


async def test_they_do_not_take_the_place_of_the_orders_own_in_the_receipt(project: Path, backplane_home: Path) -> None:
    run, events, _ = await solve(backplane_home, [Turn(text="ok")], job(project))
    assert "the nearest words" not in everything(run, events)


@pytest.mark.parametrize("rule", ["AGENTS.md", "**/AGENTS.md", "{root}/AGENTS.md"])
@pytest.mark.parametrize("mode", ["staged", "pass_through"])
async def test_a_file_that_may_not_be_read_is_not_given(
    rule: str, mode: str, project: Path, backplane_home: Path
) -> None:
    policy = PolicyProfile(deny_read=(rule.format(root=project),))
    run, _, server = await solve(backplane_home, [Turn(text="ok")], job(project, mode=mode, policy=policy))
    system = system_of(server)
    assert "the nearest words" not in system
    # The other file of the folder is no way round the rule, but it is no file of the rule either.
    assert "the other name" in system
    assert "../CLAUDE.md" in [row["path"] for row in backplane_of(run)["project_instructions"]]


async def test_a_link_is_followed_inside_the_workspace_alone(tmp_path: Path, backplane_home: Path) -> None:
    wrote(tmp_path / "secret.txt", "the secret words\n")
    work = tmp_path / "repo"
    wrote(work / "docs/agents.md", "the linked words\n")
    (work / "AGENTS.md").symlink_to("../secret.txt")
    (work / "CLAUDE.md").symlink_to("docs/agents.md")
    run, _, server = await solve(backplane_home, [Turn(text="ok")], job(work))
    assert "the secret words" not in system_of(server)
    assert "the linked words" in system_of(server)
    assert [row["path"] for row in backplane_of(run)["project_instructions"]] == ["CLAUDE.md"]


async def test_a_pipe_an_empty_file_and_a_binary_are_passed_over(tmp_path: Path, backplane_home: Path) -> None:
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / "AGENTS.md")
    wrote(tmp_path / "a/CLAUDE.md", " \n")
    (tmp_path / "a/b").mkdir()
    (tmp_path / "a/b/AGENTS.md").write_bytes(b"\x7fELF\0\0words")
    run, _, server = await solve(backplane_home, [Turn(text="ok")], job(tmp_path / "a/b"))
    assert ended(run)[0] == "complete"
    assert "project_instructions" not in backplane_of(run)
    assert "ELF" not in system_of(server)


async def test_what_is_too_long_is_cut_from_the_farthest_with_a_warning(tmp_path: Path, backplane_home: Path) -> None:
    (tmp_path / ".git").mkdir()
    wrote(tmp_path / "AGENTS.md", "f" * 1000)
    wrote(tmp_path / "a/AGENTS.md", "n" * (BYTES_MAX - 100))
    run, events, server = await solve(backplane_home, [Turn(text="ok")], job(tmp_path / "a"))
    rows = backplane_of(run)["project_instructions"]
    assert [(row["bytes"], row.get("cut_from")) for row in rows] == [(100, 1000), (BYTES_MAX - 100, None)]
    assert "n" * (BYTES_MAX - 100) in system_of(server)
    assert "f" * 101 not in system_of(server)
    cut = [event.ext["cut_instructions"] for event in of(Warned, events) if "cut_instructions" in (event.ext or {})]
    assert cut == [["../AGENTS.md"]]


@pytest.mark.parametrize("host", ["claude", "codex", "copilot", "kimi", "gemini", "opencode", "qwen"])
def test_a_host_says_what_its_agent_reads_itself_and_refuses_to_keep_it_from_that(host: str, tmp_path: Path) -> None:
    with Child((*PYTHON, str(ROOT / "hosts" / "agent.py"), host)) as child:
        config = {"vendor": {"abp": {"project_instructions": False}}}
        child.send(sent("r1", "do it", PLAIN, workspace={"root": str(tmp_path)}, config=config))
        told = child.until("final", "fatal", wait_s=15.0)
    assert {"AGENTS.md", "CLAUDE.md", "GEMINI.md"} & set(told[0]["instruction_files"])
    assert "project_instructions" not in told[0]["heeds"]
    assert told[-1]["error_code"] == "capability_unsupported"
