"""What a host begins before its event loop is loaded: the run takes it, and what no run takes is ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.peers import PYTHON, ROOT, Child, is_gone, run

pytestmark = pytest.mark.usefixtures("no_child_left")

HOST = """
import os, sys
from pathlib import Path
from backplane.contract.capability import NATIVE
from backplane.agents import begin
from backplane.errors import ConfigError
from backplane.host import EXTENSIONS, Done, Given, Host, HostRun, main

WAY = sys.argv[1]

def start(run, state):
    if WAY == "refuses":
        raise ConfigError("config_invalid", "not such an order")
    said = "sorted(map(int, os.listdir('/proc/self/fd')))" if WAY == "lists" else "os.getpid()"
    # Without what the suite puts into a Python of this environment, which holds a descriptor of its own.
    return (sys.executable, "-S", "-c", f"import os; print({said}, flush=True); input()"), {}

def early(run: Given):
    begun = begin.early(start)(run)
    loaded = sorted({"asyncio", "json", "backplane.policy.urls"} & set(sys.modules))
    Path(os.environ["TOLD"]).write_text(f"{begun.launched.leader.pid} {begun.state} {loaded}")
    return begun

async def work(run: HostRun) -> Done:
    from backplane.agents import program
    if WAY == "fails":
        raise ConfigError("config_invalid", "the order is not done")

    class Turn:
        def __init__(self, child): self.child = child
        async def cancel(self): run.scope.cancel()
        async def more(self, text): pass
        async def interrupt(self): pass
        async def go(self):
            import anyio
            await anyio.wait_readable(self.child.stdout)
            await run.message(os.read(self.child.stdout, 99).decode().strip())
            if WAY == "waits":
                await anyio.sleep_forever()
            return Done()

    return await program.drive(run, start, lambda run, child, begun: Turn(child))

main(Host(id="early", capabilities={"streaming": NATIVE}), work, early=early)
"""


class Early:
    """Such a host, and what it told of what it began."""

    def __init__(self, folder: Path, way: str) -> None:
        path = folder / "early.py"
        path.write_text(HOST)
        self.told = folder / "told"
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        env = {**os.environ, "TOLD": str(self.told), "TMPDIR": str(self.tmp)}
        self.child = Child((*PYTHON, path, way), env=env)
        self.order: dict[str, Any] = run()
        self.order["work_order"]["workspace"]["root"] = str(folder)

    def gone(self) -> bool:
        """Whether nothing of what was begun is left."""
        return not list(self.tmp.iterdir()) and (
            not self.told.exists() or is_gone(int(self.told.read_text().split()[0]))
        )


def test_a_program_is_begun_before_the_loop_and_its_run_takes_it(tmp_path: Path) -> None:
    host = Early(tmp_path, "works")
    with host.child as child:
        child.until("hello")
        child.send(msgspec.json.encode(host.order) + b"\n")  # As a control plane writes, not as `json` does.
        *events, final = child.until("final")
        assert final["receipt"]["outcome"] == "complete"
        assert [event["event"]["text"].isdecimal() for event in events if "text" in event["event"]] == [True]
        assert host.told.read_text().endswith(" []")
        assert host.gone()
        child.send(run("r2"))
        assert child.until("final")[-1]["receipt"]["outcome"] == "complete"


def test_what_a_run_does_not_take_is_ended(tmp_path: Path) -> None:
    host = Early(tmp_path, "fails")
    with host.child as child:
        child.until("hello")
        child.send(host.order)
        assert child.until("fatal")[-1]["error_code"] == "config_invalid"
        assert host.told.exists()
        assert host.gone()


def test_a_program_begun_by_a_fork_of_its_host_has_nothing_of_the_host(tmp_path: Path) -> None:
    host = Early(tmp_path, "lists")
    with host.child as child:
        child.until("hello")
        child.send(host.order)
        *events, _ = child.until("final")
        # Its three, and the one that lists them.
        assert "[0, 1, 2, 3]" in [event["event"].get("text") for event in events if event["t"] == "event"]


def test_an_error_of_the_beginning_is_told_by_the_run(tmp_path: Path) -> None:
    host = Early(tmp_path, "refuses")
    with host.child as child:
        child.until("hello")
        child.send(host.order)
        fatal = child.until("fatal")[-1]
        assert (fatal["error_code"], fatal["error"]) == ("config_invalid", "not such an order")
        assert host.gone()


@pytest.mark.parametrize("way", ["kill", "eof", "cancel"])
def test_nothing_that_was_begun_outlives_its_host(tmp_path: Path, way: str) -> None:
    host = Early(tmp_path, "waits")
    with host.child as child:
        child.until("hello")
        child.send(host.order)
        pid = int(child.until("event", "event")[-1]["event"].get("text", "0"))
        while not pid:
            pid = int(child.read()["event"].get("text", "0"))
        if way == "kill":
            child.process.kill()
        elif way == "eof":
            child.close_stdin()
        else:
            child.send({"t": "cancel", "ref_id": host.order["id"]})
            child.until("final")
        assert is_gone(pid)


def test_whoever_says_something_else_first_is_answered_at_once(tmp_path: Path) -> None:
    host = Early(tmp_path, "works")
    with host.child as child:
        child.until("hello")
        child.send({"t": "ping", "seq": 7})
        assert child.until("pong")[-1]["seq"] == 7
        child.send(b"no json\n")
        child.until("fatal")
        child.send(host.order)
        assert child.until("final")[-1]["receipt"]["outcome"] == "complete"
        assert not host.told.exists()


def test_an_end_before_the_first_word_is_an_end(tmp_path: Path) -> None:
    host = Early(tmp_path, "works")
    with host.child as child:
        child.until("hello")
        child.close_stdin()
        assert child.wait() == 0


@pytest.mark.parametrize("host", ["claude", "codex"])
def test_a_host_loads_little_before_its_agent_is_started(host: str) -> None:
    late = (
        "anyio asyncio inspect pathlib shutil signal socket subprocess tempfile tomllib typing_extensions urllib.parse"
    )
    put = f"import sys; sys.path[:0] = [{str(ROOT / 'hosts')!r}]"
    look = f"{put}; import {host}, backplane.process.launch; print(*sys.modules)"
    # Without what an environment itself loads at each start; the path is that of this Python.
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-S", "-c", look], env=env, capture_output=True, text=True, check=True)
    assert set(late.split()) & set(done.stdout.split()) == set()
