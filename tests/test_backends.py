"""Named ways to reach a host: which there are, how they start, and how a function is stopped like a program."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from backplane.config import BackendSettings, Limits, Settings
from backplane.contract.work import WorkOrder
from backplane.errors import BackendError, ConfigError
from backplane.runtime import backends, readiness
from backplane.runtime.backends import ProcessBackend
from backplane.runtime.memory import MemoryBackend

ORDER = WorkOrder("x")


def settings(**declared: BackendSettings) -> Settings:
    return Settings(backends=declared, limits=Limits(hello_s=7.0))


# Finding --------------------------------------------------------------------------------------------------------------


def test_a_configured_backend_goes_before_a_shipped_one() -> None:
    own = settings(shell=BackendSettings(command=("/bin/cat",)))
    found = backends.find("shell", own, {})
    assert isinstance(found, ProcessBackend)
    assert found.argv == ("/bin/cat",)
    shipped = backends.find("shell", settings(), {})
    assert isinstance(shipped, ProcessBackend)
    assert shipped.argv[0] == sys.executable
    assert Path(shipped.argv[-1]).name == "shell.py"


def test_a_backend_may_be_a_shipped_host_under_another_name_with_limits_of_its_own() -> None:
    found = backends.find("mine", settings(mine=BackendSettings(host="mock", idle_s=1.5)), {})
    assert isinstance(found, ProcessBackend)
    assert found.id == "mine"
    assert found.limits is not None
    assert (found.limits.hello_s, found.limits.idle_s) == (7.0, 1.5)


def test_a_value_with_a_dollar_is_a_variable_of_ours_and_a_secret() -> None:
    own = settings(x=BackendSettings(command=("/bin/cat",), env={"KEY": "$OUR_KEY", "PLAIN": "value"}))
    found = backends.find("x", own, {"OUR_KEY": "hunter2hunter2"})
    assert isinstance(found, ProcessBackend)
    assert found.env == {"KEY": "hunter2hunter2", "PLAIN": "value"}
    assert found.secrets == ("hunter2hunter2",)
    with pytest.raises(BackendError, match="OUR_KEY") as error:
        backends.find("x", own, {})
    assert error.value.code == "backend_unavailable"


@pytest.mark.parametrize(
    ("declared", "variable"),
    [
        (BackendSettings(host="claude"), "ANTHROPIC_API_KEY"),
        (BackendSettings(host="codex"), "OPENAI_API_KEY"),
        (BackendSettings(host="qwen"), "OPENAI_API_KEY"),
        (BackendSettings(host="acp", options={"profile": "gemini"}), "GEMINI_API_KEY"),
        (BackendSettings(host="acp", options={"profile": "codex-acp"}), "OPENAI_API_KEY"),
        (BackendSettings(host="acp", options={"program": "mine", "key_env": "MY_KEY"}), "MY_KEY"),
        (BackendSettings(host="opencode"), None),
    ],
    ids=lambda value: value if isinstance(value, str | None) else "",
)
def test_an_agent_is_given_its_own_key_and_no_other(declared: BackendSettings, variable: str | None) -> None:
    names = ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY", "MY_KEY")
    found = backends.find("mine", settings(mine=declared), {name: f"of-{name}" for name in names})
    assert isinstance(found, ProcessBackend)
    assert {name for name in names if name in found.env} == {variable} - {None}
    assert found.secrets == ((f"of-{variable}",) if variable else ())


@pytest.mark.parametrize("host", ["claude", "codex"])
@pytest.mark.parametrize("address", ["", "nonsense", "ftp://x", "http://", "http://[::1", "http://127.0.0.1:99999/v1"])
def test_an_agents_service_has_an_address_before_anything_is_started(host: str, address: str) -> None:
    own = settings(mine=BackendSettings(host=host, options={"base_url": address}))
    with pytest.raises(ConfigError, match="is no address of a service"):
        backends.find("mine", own, {})
    fine = settings(mine=BackendSettings(host=host, options={"base_url": "http://[::1]:80/v1"}))
    assert backends.find("mine", fine, {}).endpoints == ("::1:80",)


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(BackendError) as error:
        backends.find("nobody", settings(mine=BackendSettings(host="mock")), {})
    assert error.value.code == "backend_not_found"
    assert "mine, mock" in str(error.value.hint)
    with pytest.raises(ConfigError, match="no shipped host"):
        backends.find("x", settings(x=BackendSettings(host="nobody")), {})


def test_every_backend_is_listed_ready_or_not_with_what_to_do() -> None:
    own = settings(
        absent=BackendSettings(command=("/no/such/program",)),
        keyless=BackendSettings(command=("/bin/cat",), env={"KEY": "$OUR_KEY"}),
        wrong=BackendSettings(host="nobody"),
    )
    listed = {status.id: status for status in readiness.known(own, {"PATH": os.environ["PATH"]})}
    assert list(listed) == sorted(listed)
    assert {name for name, status in listed.items() if status.ready} >= {"mock", "shell"}
    for name in ("absent", "keyless", "wrong"):
        assert not listed[name].ready
        assert listed[name].why
        assert listed[name].fix
    assert listed["shell"].command


@pytest.mark.parametrize(
    ("command", "argv", "name"),
    [
        ("node 'my host.mjs' --x", ("node", "my host.mjs", "--x"), "sidecar:node"),
        ("./bin/host", ("{cwd}/bin/host",), "sidecar:host"),
        ("/usr/bin/host a", ("/usr/bin/host", "a"), "sidecar:host"),
        (("host", "a b"), ("host", "a b"), "sidecar:host"),
    ],
)
def test_a_command_is_split_like_a_shell_does_and_counts_from_its_folder(
    command: Any, argv: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    found = backends.from_command(command, cwd=tmp_path)
    assert found.argv == tuple(word.format(cwd=tmp_path) for word in argv)
    assert found.id == name


@pytest.mark.parametrize("command", ["", "  ", "node 'open", ()])
def test_a_command_that_cannot_be_read_is_a_fault_of_the_configuration(command: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        backends.from_command(command, cwd=tmp_path)
    assert error.value.code == "config_invalid"


def test_a_program_that_changed_is_another_host(tmp_path: Path) -> None:
    program = tmp_path / "host.py"
    program.write_text("one")
    backend = ProcessBackend(id="x", argv=(sys.executable, str(program)))
    key = backend.key
    assert key == ProcessBackend(id="y", argv=backend.argv).key
    program.write_text("two, and longer")
    assert backend.key != key
    program.unlink()
    assert backend.key != key
    assert ProcessBackend(id="x", argv=("a\0b", "x" * 5_000)).key


def test_a_child_gets_a_clean_environment(tmp_path: Path) -> None:
    backend = ProcessBackend(id="x", argv=("/bin/env",), env={"MINE": "1"})

    async def read() -> bytes:
        data = b""
        async with backend.open(ORDER, {**os.environ, "SECRET_OF_OURS": "leaked"}) as link:
            while True:
                await anyio.wait_readable(link.stdout)
                chunk = os.read(link.stdout, 65536)
                if not chunk:
                    break
                data += chunk
            await link.stop(grace_s=1.0)
        return data

    said = anyio.run(read).decode()
    assert "MINE=1\n" in said
    assert "leaked" not in said


# A function in memory -------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_function_reads_and_writes_the_same_bytes_as_a_child() -> None:
    async def serve(stdin: int, stdout: int) -> None:
        while True:
            await anyio.wait_readable(stdin)
            data = os.read(stdin, 100)
            if not data:
                return
            os.write(stdout, data.upper())

    async with MemoryBackend(id="m", serve=serve).open(ORDER, {}) as link:
        assert link.pid == os.getpid()
        os.write(link.stdin, b"hello\n")
        with anyio.fail_after(5):
            await anyio.wait_readable(link.stdout)
        assert os.read(link.stdout, 100) == b"HELLO\n"
        assert await link.wait(0.01) is None
        link.close_stdin()
        exit_ = await link.wait(5)
        assert exit_ is not None
        assert exit_.code == 0
        assert (link.stderr_tail, link.stderr_dropped, link.swept) == (b"", 0, 0)
        await link.stop(grace_s=1.0)
    assert (link.stdin, link.stdout) == (-1, -1)


@pytest.mark.anyio
async def test_a_function_that_fails_has_last_words_and_an_exit_code() -> None:
    async def serve(stdin: int, stdout: int) -> None:
        async with anyio.create_task_group() as tasks:

            async def fail() -> None:
                raise OSError("the disk is gone")

            tasks.start_soon(fail)

    async with MemoryBackend(id="m", serve=serve).open(ORDER, {}) as link:
        exit_ = await link.wait(5)
        assert exit_ is not None
        assert exit_.code == 1
        assert link.stderr_tail == b"OSError: the disk is gone"


@pytest.mark.anyio
@pytest.mark.parametrize("cancels", [True, False])
async def test_a_function_that_does_not_listen_is_cancelled(cancels: bool) -> None:
    ended = []

    async def serve(stdin: int, stdout: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    asked: list[float] = []

    async def cancel(grace_s: float) -> None:
        asked.append(grace_s)
        await anyio.sleep_forever()

    async with MemoryBackend(id="m", serve=serve).open(ORDER, {}) as link:
        began = time.monotonic()
        await link.stop(grace_s=0.2, cancel=cancel if cancels else None)
        assert time.monotonic() - began < 4.0
        assert link.exit is not None
    assert ended == [True]
    assert asked == [0.2] * cancels


@pytest.mark.anyio
async def test_no_step_waits_once_the_function_has_ended() -> None:
    async def serve(stdin: int, stdout: int) -> None:
        await anyio.sleep(0.1)

    async def cancel(grace_s: float) -> None:
        await anyio.sleep_forever()

    async with MemoryBackend(id="m", serve=serve).open(ORDER, {}) as link:
        began = time.monotonic()
        await link.stop(grace_s=30.0, cancel=cancel)
        assert time.monotonic() - began < 5.0


@pytest.mark.anyio
async def test_an_exception_in_the_block_comes_out_as_it_is_and_leaves_nothing() -> None:
    class Mine(Exception):
        pass

    async def serve(stdin: int, stdout: int) -> None:
        await anyio.sleep_forever()

    async def fail() -> None:
        async with MemoryBackend(id="m", serve=serve).open(ORDER, {}):
            raise Mine

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(Mine):
            await fail()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_an_agent_is_not_ready_where_its_host_would_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    found = backends.find("claude", Settings(), {"PATH": str(program.parent)})
    assert isinstance(found, ProcessBackend)
    assert readiness.missing_program(found, {"PATH": str(program.parent)}) is None
    missing = readiness.missing_program(found, {"PATH": "bin"})
    assert missing is not None
    assert missing.code == "backend_unavailable"
