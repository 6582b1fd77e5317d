"""An agent's program around one run of its host: it is told what went wrong, and nothing of it outlives its host."""

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
import sys
from backplane.agents.rows import AgentRow
from backplane.contract.capability import NATIVE
from backplane.host import Host, Deferred, main

main(
    Host(id="served", capabilities={"streaming": NATIVE}),
    Deferred("backplane.agents.program:drive", "served_agent", AgentRow(program=sys.argv[1])),
)
"""

START = """
import sys
from backplane.errors import ConfigError

def start(begun):
    way = begun.row.program
    if way == "refuses":
        raise ConfigError("config_invalid", "not such an order")
    said = "sorted(map(int, os.listdir('/proc/self/fd')))" if way == "lists" else "os.getpid()"
    begun.env = {}
    # Without what the suite puts into a Python of this environment, which holds a descriptor of its own.
    return (sys.executable, "-S", "-c", f"import os; print({said}, flush=True); input()")
"""

AGENT = """
import os
import anyio
from backplane.agents.agent import Agent as BaseAgent, Ending
from backplane.agents.order import RunSpec
from backplane.agents.reader import EventReader
from backplane.errors import ConfigError

class Agent(BaseAgent):
    def __init__(self, session, begun):
        super().__init__(session, EventReader(session.run.now, session.root))
        self.begun = begun

    @classmethod
    def spec(cls, begun):
        if begun.row.program == "fails":
            raise ConfigError("config_invalid", "the order is not done")
        return RunSpec(prompt="work")

    async def run(self):
        await anyio.sleep_forever()

    async def say(self, words):
        await anyio.wait_readable(self.begun.child.stdout)
        await self.session.run.message(os.read(self.begun.child.stdout, 99).decode().strip())
        if self.begun.row.program == "waits":
            await anyio.sleep_forever()
        return Ending()
"""


class Served:
    """Such a host."""

    def __init__(self, folder: Path, way: str) -> None:
        path = folder / "served.py"
        path.write_text(HOST)
        package = folder / "served_agent"
        package.mkdir()
        (package / "start.py").write_text(START)
        (package / "agent.py").write_text(AGENT)
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.child = Child((*PYTHON, path, way), env={**os.environ, "TMPDIR": str(self.tmp)})
        self.order: dict[str, Any] = run()
        self.order["work_order"]["workspace"]["root"] = str(folder)

    def gone(self) -> bool:
        """Whether nothing of the program's folder is left."""
        return not list(self.tmp.iterdir())


def test_a_program_runs_an_order_and_then_another(tmp_path: Path) -> None:
    host = Served(tmp_path, "works")
    with host.child as child:
        child.until("hello")
        child.send(msgspec.json.encode(host.order) + b"\n")  # As a control plane writes, not as `json` does.
        *events, final = child.until("final")
        assert final["receipt"]["outcome"] == "complete"
        assert [event["event"]["text"].isdecimal() for event in events if "text" in event["event"]] == [True]
        assert host.gone()
        child.send(run("r2"))
        assert child.until("final")[-1]["receipt"]["outcome"] == "complete"


def test_what_nobody_speaks_with_is_ended(tmp_path: Path) -> None:
    host = Served(tmp_path, "fails")
    with host.child as child:
        child.until("hello")
        child.send(host.order)
        assert child.until("fatal")[-1]["error_code"] == "config_invalid"
        assert host.gone()


def test_a_program_has_nothing_of_its_host(tmp_path: Path) -> None:
    host = Served(tmp_path, "lists")
    with host.child as child:
        child.until("hello")
        child.send(host.order)
        *events, _ = child.until("final")
        # Its three, and the one that lists them.
        assert "[0, 1, 2, 3]" in [event["event"].get("text") for event in events if event["t"] == "event"]


def test_an_error_of_the_start_is_told_by_the_run(tmp_path: Path) -> None:
    host = Served(tmp_path, "refuses")
    with host.child as child:
        child.until("hello")
        child.send(host.order)
        fatal = child.until("fatal")[-1]
        assert (fatal["error_code"], fatal["error"]) == ("config_invalid", "not such an order")
        assert host.gone()


@pytest.mark.parametrize("way", ["kill", "eof", "cancel"])
def test_nothing_that_was_started_outlives_its_host(tmp_path: Path, way: str) -> None:
    host = Served(tmp_path, "waits")
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
    host = Served(tmp_path, "works")
    with host.child as child:
        child.until("hello")
        child.send({"t": "ping", "seq": 7})
        assert child.until("pong")[-1]["seq"] == 7
        child.send(b"no json\n")
        child.until("fatal")
        child.send(host.order)
        assert child.until("final")[-1]["receipt"]["outcome"] == "complete"


def test_an_end_before_the_first_word_is_an_end(tmp_path: Path) -> None:
    host = Served(tmp_path, "works")
    with host.child as child:
        child.until("hello")
        child.close_stdin()
        assert child.wait() == 0


def test_the_host_of_an_agent_loads_little_before_its_hello() -> None:
    late = (
        "anyio asyncio inspect pathlib shutil signal socket subprocess tempfile tomllib typing_extensions urllib.parse"
    )
    put = f"import sys; sys.path[:0] = [{str(ROOT / 'hosts')!r}]"
    look = f"{put}; import agent; print(*sys.modules)"
    # Without what an environment itself loads at each start; the path is that of this Python.
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-S", "-c", look], env=env, capture_output=True, text=True, check=True)
    assert set(late.split()) & set(done.stdout.split()) == set()
