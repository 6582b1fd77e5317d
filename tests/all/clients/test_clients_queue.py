"""The clients of `contracts/clients/` over `serve --engine`: the same orders and results, run by another process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.all.clients.test_clients import CASES, DRIVERS, EXPECTED, Bench, played
from tests.queues import needs_queue

needs_queue()

CELLS = ("complete", "fatal", "refused", "order without a task", "ask allow", "cancel", "trace beyond the line limit")
PLAY_S_MAX = 200


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A folder with a queue and one worker of it; the worker's home is its own."""
    place = Bench(tmp_path_factory.mktemp("queue"))
    *words, serve, option, file = place.server
    queue = ["--engine", f"sqlite:///{place.folder / 'queue.sqlite'}"]
    place.server = [*words, serve, option, file, *queue]
    worker = [*words, "queue", "worker", option, file, *queue, "--slots", "2", "--poll", "0.2", "--lease", "30"]
    env = place.env | {"BACKPLANE_HOME": str(place.folder / "worker")}
    with (place.folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(worker, env=env, stdout=log, stderr=log)
    yield place
    process.terminate()
    assert process.wait(40) == 0, (place.folder / "worker.log").read_text()


@pytest.mark.timeout(PLAY_S_MAX + 100)
def test_a_queue_looks_to_a_client_as_one_machine(needs: Callable[[str], str], place: Bench) -> None:
    cases = [one for one in CASES if one["cell"] in CELLS]
    found, end = played(DRIVERS["node"](needs), place, cases, PLAY_S_MAX)
    assert found == {cell: EXPECTED[cell] for cell in CELLS}, end
