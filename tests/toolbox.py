"""Tools for tests: one call in a folder, under a policy, with an environment that is known."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backplane.contract.work import PolicyProfile
from backplane.policy.rules import compile_policy
from backplane.tools import CallResult, Toolbox

ENV = {"PATH": os.environ["PATH"], "GREETING": "hello"}


async def silent(_: str) -> None:
    pass


async def answered(question: str, options: tuple[str, ...]) -> str:
    return f"{question} {'|'.join(options)}"


def box(root: Path, hear: Any = silent, **profile: Any) -> Toolbox:
    policy = compile_policy(PolicyProfile(**profile))
    return Toolbox(str(root), policy, env=ENV, hear=hear, ask_user=answered)


async def run(root: Path, name: str, hear: Any = silent, policy: Any = None, **input: Any) -> CallResult:
    return await box(root, hear, **(policy or {})).run(name, input)
