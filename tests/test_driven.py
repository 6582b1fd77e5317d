"""What is told of an agent's program that failed."""

from __future__ import annotations

import sys

import anyio
import pytest

from backplane.driven.program import with_words
from backplane.errors import BackendError, BackplaneError, ConfigError
from backplane.process import Command, open_child

pytestmark = pytest.mark.anyio

SAYS = r"""
import sys
sys.stderr.write("\x1b]0;title\x07\x1b[1;31mfatal:\x1b[0m no disk\r\n")
sys.exit(3)
"""


async def told(error: BackplaneError) -> BaseException:
    """The failure after a program that said why it ended."""
    async with open_child(Command(argv=(sys.executable, "-I", "-c", SAYS), env={})) as child:
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


async def test_a_failure_that_the_program_has_no_part_in_is_told_without_its_words() -> None:
    error = ConfigError("config_invalid", "prices are missing", hint="give them")
    assert await told(error) is error
