"""More of `tests/test_runtime_limits.py`: what takes many processes, or seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import QUICK, ended, go, order, plane, script, within

pytestmark = pytest.mark.anyio


CALLS = """
def call(run, id, name="bash", **more): return event(run, type="tool_call", tool_name=name, input={}, tool_use_id=id)
def result(run, id, name="bash"):
    return event(run, type="tool_result", tool_name=name, output="", is_error=False, tool_use_id=id)
hello(); run = take()
"""


@pytest.mark.parametrize(
    ("body", "end", "words"),
    [
        ("put(call(run, 'a')); time.sleep(0.9); put(result(run, 'a'), final(run)); end()", "complete", ""),
        ("put(call(run, None)); time.sleep(0.9); put(result(run, None), final(run)); end()", "complete", ""),
        ("put(call(run, 'a')); time.sleep(60)", "idle", "while its call of 'bash' was open (tool_s)"),
        ("put(call(run, 'a'), call(run, 'b', 'edit'), result(run, 'b', 'edit')); time.sleep(60)", "idle", "'bash' was"),
        ("put(call(run, 'a'), result(run, 'a')); time.sleep(60)", "idle", "for 0.5 s (idle_s)"),
        ("put(call(run, 'a'), result(run, 'b')); time.sleep(60)", "idle", "(tool_s)"),
        (
            "put(call(run, 'a'), event(run, type='warning', text=None, message='', ext={'turn': {}})); time.sleep(60)",
            "idle",
            "(idle_s)",
        ),
        (
            "put(call(run, 'a'), event(run, type='warning', text=None, message='', ext={'turn': "
            "{'stop_reason': 'tool_use'}})); time.sleep(60)",
            "idle",
            "(tool_s)",
        ),
        (
            "put(call(run, 'a'))\nfor _ in range(4): time.sleep(0.4); put(event(run, 'still at it'))\n"
            "put(result(run, 'a'), final(run)); end()",
            "complete",
            "",
        ),
    ],
)
async def test_silence_in_a_tools_call_has_a_limit_of_its_own(
    body: str, end: str, words: str, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    async with plane(backplane_home, idle_s=0.5, tool_s=1.3) as control, within(5):
        run, _ = await go(control, order(root), script(tmp_path, CALLS + body))
    assert ended(run)[0] == end, run.error
    assert words in str(run.error)


async def test_a_host_that_never_reads_its_input_is_given_up(
    backplane_home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backplane.runtime.channel.WRITE_S", 0.5)
    backend = script(tmp_path, "hello(); deaf(); time.sleep(60)")
    async with (
        plane(backplane_home, idle_s=1.5) as control,
        within(1.5 + 0.5 + 0.5 + QUICK.cancel_grace_s),
    ):
        run, _ = await go(control, order(root, task="x" * 1_000_000), backend)
    assert ended(run) == ("idle", "backend_timeout", "failed")
    assert "did not read its input" in str(run.error)


@pytest.mark.parametrize(("size", "lives"), [(100, True), (1_000_000, False)])
async def test_a_host_that_closes_its_input_before_the_order_fails_soon(
    size: int, lives: bool, backplane_home: Path, root: Path, tmp_path: Path
) -> None:
    body = "os.close(0); hello(); time.sleep(60)" if lives else "os.close(0); hello(); os._exit(4)"
    async with plane(backplane_home) as control, within(1.0 + 0.5 + QUICK.cancel_grace_s):
        run, _ = await go(control, order(root, task="x" * size), script(tmp_path, body))
    expected = ("protocol", "stream_closed", "failed") if lives else ("host_exit", "backend_crashed", "failed")
    assert ended(run) == expected
