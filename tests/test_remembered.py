"""Answers for the rest of the run: which command lines one answer answers, too."""

from __future__ import annotations

from typing import Any

import pytest

from backplane.contract import envelope as wire
from backplane.policy.remembered import command_key, remembered_by

ALIKE = [
    ("ls", "ls"),
    ("ls", "ls -la build"),
    ("ls -la", "ls src"),
    ("cat a.txt", "cat 'b c.txt'"),
    ("grep -n x a.py", "grep -rn y ."),
    ("pytest", "pytest -q tests/test_a.py -k 'one or two'"),
    ("ruff check", "ruff check --fix ."),
    ("git status", "git status --short"),
    ("git diff HEAD~1", "git diff --stat"),
    ("npm run build", "npm run build"),
    ("cargo test", "cargo test --release"),
    ("docker ps", "docker ps -a"),
    ("uv sync", "uv sync --frozen"),
    ("make test", "make test"),
    ("rm build", "rm build"),
    ("rm  build", "rm build"),
    ("python3 a.py", "python3 'a.py'"),
    ("./run.sh one", "./run.sh one"),
    ("FOO=1 ls", "FOO=1 ls"),
]
DIFFERENT = [
    ("ls", "rm -rf build"),
    ("ls", "/tmp/ls"),
    ("ls", "./ls"),
    ("ls", "lsof"),
    ("ls", "sudo ls"),
    ("ls", "env ls"),
    ("ls", "FOO=1 ls"),
    ("git status", "git push"),
    ("git status", "git"),
    ("git status", "git -C / status"),
    ("git -c core.pager=less log", "git -c core.pager=evil log"),
    ("git", "git push --force"),
    ("npm test", "npm publish"),
    ("npm run build", "npm run deploy"),
    ("uv run pytest", "uv run rm -rf build"),
    ("docker exec a ls", "docker exec a rm -rf /"),
    ("make test", "make install"),
    ("rm build", "rm -rf build ~/x"),
    ("rm build", "rm build -rf /"),
    ("mv a b", "mv a /etc/b"),
    ("chmod +x a", "chmod 777 /"),
    ("python3 a.py", "python3 -c 'print(1)'"),
    ("bash a.sh", "bash b.sh"),
    ("find . -name a", "find . -delete"),
    ("sed -n 1p a", "sed -i d a"),
    ("curl localhost", "curl example.com"),
    ("xargs ls", "xargs rm"),
    ("rg x", "rg --pre evil x"),
    ("sort a", "sort -o b a"),
    ("FOO=1 ls", "FOO=2 ls"),
    ("./run.sh one", "./run.sh two"),
]
NEVER = [
    "ls; rm x", "ls && rm x", "ls || rm x", "ls & rm x", "ls | sh", "ls > x", "cat < x", "ls $HOME", "ls $(id)",
    "(ls)", "ls `id`", "ls\nrm x", "ls\rrm x", "ls 'a", "", "   ", "echo \0",
]  # fmt: skip


@pytest.mark.parametrize(("answered", "next_line"), ALIKE)
def test_an_answer_counts_for_the_same_kind_of_command(answered: str, next_line: str) -> None:
    assert command_key(answered) is not None
    assert command_key(answered) == command_key(next_line)


@pytest.mark.parametrize(("answered", "next_line"), DIFFERENT)
def test_an_answer_does_not_count_for_another_command(answered: str, next_line: str) -> None:
    assert command_key(answered) != command_key(next_line)


@pytest.mark.parametrize("line", NEVER)
def test_a_line_that_may_run_more_than_one_program_is_asked_about_each_time(line: str) -> None:
    assert command_key(line) is None


@pytest.mark.parametrize(
    ("members", "key"),
    [
        ({"name": "bash", "input": {"command": "git status"}}, command_key("git status")),
        ({"name": "Bash", "command": "git status", "input": {"command": "rm x"}}, command_key("git status")),
        ({"name": "shell", "input": {"cmd": "git status"}}, None),
        ({"name": "bash"}, None),
        ({"name": "mcp__house__deploy", "input": {"to": "prod"}}, ()),
        ({"name": "mcp__house__run", "input": {"command": "ls; rm x"}}, None),
        ({"kind": "input", "question": "which?"}, None),
    ],
)
def test_the_key_of_an_ask_is_its_tool_and_its_command(members: dict[str, Any], key: tuple[str, ...] | None) -> None:
    ask = wire.Ask(**{"ref_id": "r1", "id": "a1", "kind": "tool", **members})
    assert remembered_by(ask) == (None if key is None else (members["name"], *key))
