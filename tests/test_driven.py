"""What is told of an agent's program that failed, and of an order that it would not understand."""

from __future__ import annotations

import re
import sys
from typing import Any

import anyio
import pytest

from backplane.agents.order import own_settings, server_rows
from backplane.agents.program import with_words
from backplane.agents.rows import AgentRow
from backplane.agents.start import AgentStart
from backplane.contract import envelope as wire
from backplane.contract.work import RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackendError, BackplaneError, ConfigError
from backplane.host import Given
from backplane.policy.rules import compile_policy
from backplane.process.child import open_child
from backplane.process.launch import StartCommand
from backplane.runtime.servers import servers_of

pytestmark = pytest.mark.anyio

SAYS = r"""
import sys
sys.stderr.write("\x1b]0;title\x07\x1b[1;31mfatal:\x1b[0m no disk\r\n")
sys.exit(3)
"""


async def told(error: BackplaneError, says: str = SAYS) -> BaseException:
    """The failure after a program that said why it ended."""
    async with open_child(StartCommand(argv=(sys.executable, "-I", "-c", says), env={})) as child:
        with anyio.fail_after(5):
            await child.wait(5.0)
            while not child.stderr_tail.endswith(b"\n"):
                await anyio.sleep(0.01)
        return with_words(ExceptionGroup("", [ExceptionGroup("", [error])]), child)


@pytest.mark.parametrize("code", ["backend_crashed", "backend_unavailable", "backend_timeout"])
async def test_a_failure_of_the_program_is_told_with_its_last_words_as_plain_text(code: str) -> None:
    failure = await told(BackendError(code, "it ended", hint="try again"))
    assert isinstance(failure, BackendError)
    assert (failure.code, failure.hint) == (code, "try again")
    assert failure.message.startswith("it ended (")
    assert failure.message.endswith("): fatal: no disk")


async def test_last_words_that_are_cut_begin_with_a_whole_word() -> None:
    says = "import sys; sys.stderr.write('s3cr3t-value ' + 'y' * 990 + ' ' + 'z' * 1000 + '\\n')"
    failure = await told(BackendError("backend_crashed", "it ended"), says)
    assert str(failure).endswith(": " + "y" * 990 + " " + "z" * 1000)


def given(**vendor: Any) -> Given:
    order = WorkOrder("work", workspace=WorkspaceSpec(root="/"), config=RuntimeConfig(vendor=vendor))
    return Given(wire.RunMessage(id="r", work_order=order), compile_policy(order.policy))


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (5, "Expected `array"),
        ([5], "Expected `object`"),
        ([{"name": "a"}], "neither command nor url"),
        ([{"command": "a"}], "`name`"),
        ([{"name": "a", "command": ["b"]}], "`$.command`"),
        ([{"name": "a", "command": "b", "args": "c"}], "`$.args`"),
        ([{"name": "a", "command": "b", "env": {"c": 1}}], "`$.env"),
        ([{"name": "a", "url": "b", "headers": ["c"]}], "`$.headers`"),
    ],
)
def test_a_server_that_cannot_be_read_is_a_fault_of_the_order(rows: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(names)):
        server_rows(given(abp={"mcp_servers": rows}), ())


def test_files_of_servers_are_looked_for_in_what_can_be_read() -> None:
    row = {"name": "a", "command": "b", "args": ["c", "", "d\0"], "env": {"P": "/x:/y"}}
    ordered = [5, {"name": "z", "args": "q"}, row]
    assert servers_of(ordered) == {"a": ("b", "c", "/x", "/y")}


def test_a_server_keeps_what_only_its_agent_knows() -> None:
    row = {"command": "b", "args": ["c"], "startup_timeout_sec": 3}
    assert server_rows(given(abp={"mcp_servers": [{"name": "a", **row}]}), ()) == {"a": row}


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (7, "config.vendor.mine is no object"),
        ({"pace": "slow"}, "config.vendor.mine has no setting 'pace'; known are effort"),
        ({"effort": {"a": 1}}, "config.vendor.mine.effort is no text"),
    ],
)
def test_a_setting_that_an_agent_would_not_understand_is_a_fault_of_the_order(own: Any, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own_settings(given(mine=own), "mine", ("effort",))
    assert names in f"{caught.value.message}; {caught.value.hint}"


@pytest.mark.parametrize(
    ("program", "fix"),
    [("/opt/none/it", "npm install it"), ("/tmp/none/it", "npm install it"), ("none-it", "npm install it")],
)
def test_a_program_that_is_not_there_is_told_with_what_to_do(program: str, fix: str) -> None:
    run: Any = given()
    start = AgentStart(run, AgentRow(program=program, install="npm install it"), "/none")
    start.env["PATH"] = "/usr/bin"
    with pytest.raises(BackendError) as caught:
        start.find_program()
    assert fix in (caught.value.hint or "")


async def test_a_failure_that_the_program_has_no_part_in_is_told_without_its_words() -> None:
    error = ConfigError("config_invalid", "prices are missing", hint="give them")
    assert await told(error) is error
