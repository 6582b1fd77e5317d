"""Tools that run commands, fetch pages and ask: bounded, stopped, and nothing left of them."""

from __future__ import annotations

import gzip
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane.tools import fetch
from backplane.tools.fetch import readable
from tests.conftest import children
from tests.toolbox import run

pytestmark = pytest.mark.anyio


# Commands -------------------------------------------------------------------------------------------------------------


async def test_a_command_runs_in_the_root_with_only_its_environment(tmp_path: Path) -> None:
    heard: list[str] = []

    async def hear(text: str) -> None:
        heard.append(text)

    done = await run(tmp_path, "bash", hear, command="pwd; echo $GREETING; echo err >&2; env | cut -d= -f1 | sort")
    assert done.ran is not None
    assert done.ran.exit_code == 0
    assert not done.is_error
    lines = done.text.split("\n")
    assert lines[:3] == [str(tmp_path), "hello", "err"]
    assert set(lines[3:-1]) <= {"GREETING", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert lines[-1] == "[exit code 0]"
    assert "".join(heard) == done.ran.output


async def test_a_failing_command_is_an_error_with_its_code(tmp_path: Path) -> None:
    done = await run(tmp_path, "bash", command="echo no; exit 3")
    assert (done.is_error, done.text) == (True, "no\n[exit code 3]")
    killed = await run(tmp_path, "bash", command="kill -9 $$")
    assert killed.ran is not None
    assert (killed.ran.exit_code, killed.is_error) == (None, True)


async def test_a_command_that_reads_its_input_finds_its_end(tmp_path: Path) -> None:
    with anyio.fail_after(10):
        assert (await run(tmp_path, "bash", command="cat; echo end")).text == "end\n[exit code 0]"


async def test_a_command_over_its_time_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    with anyio.fail_after(15):
        done = await run(tmp_path, "bash", command="setsid sleep 60 & echo begun; sleep 60", timeout_s=1)
    assert done.is_error
    assert done.text == "begun\n[stopped after 1 s]"
    assert not children(os.getpid())


async def test_what_a_command_leaves_running_ends_with_it(tmp_path: Path) -> None:
    with anyio.fail_after(10):
        done = await run(tmp_path, "bash", command="sleep 60 & echo done")
    assert done.text == "done\n[exit code 0]"
    assert not children(os.getpid())


async def test_a_cancelled_command_leaves_nothing(tmp_path: Path) -> None:
    begun = anyio.Event()

    async def hear(_: str) -> None:
        begun.set()

    with anyio.fail_after(15):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: run(tmp_path, "bash", hear, command="setsid sleep 60 & echo up; sleep 60"))
            await begun.wait()
            tasks.cancel_scope.cancel()
    assert not children(os.getpid())


async def test_a_flood_of_output_is_read_to_its_end_and_kept_in_part(tmp_path: Path) -> None:
    told = 0

    async def hear(text: str) -> None:
        nonlocal told
        told += len(text)

    command = "echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last"
    done = await run(tmp_path, "bash", hear, command=command)
    assert done.ran is not None
    assert len(done.ran.output) < 200_000
    assert len(done.text) < 40_000
    assert done.text.startswith("first\nxxx")
    assert done.text.endswith("xx\nlast\n[exit code 0]")
    assert told < 400_000


async def test_a_character_cut_by_the_pipe_is_passed_on_whole(tmp_path: Path) -> None:
    heard: list[str] = []

    async def hear(text: str) -> None:
        heard.append(text)

    # The second byte is written once the first was heard alone, or not at all.
    await run(tmp_path, "bash", hear, command="printf 'a\\303'; sleep 0.5; printf '\\244b'")
    assert "".join(heard) == "aäb"


# Pages and questions --------------------------------------------------------------------------------------------------


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", "/loop" if self.path == "/moved/x" else self.path[6:] or "/page")
        elif self.path == "/loop":
            self.send_response(302)
            self.send_header("Location", "/loop")
        else:
            body = PAGES.get(self.path, ("text/plain", b"none"))
            self.send_response(200 if self.path in PAGES else 404)
            self.send_header("Content-Type", body[0])
            self.send_header("Content-Length", str(len(body[1])))
            if self.path in PACKED:
                self.send_header("Content-Encoding", PACKED[self.path])
            self.end_headers()
            self.wfile.write(body[1])
            return
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


PAGES = {
    "/page": ("text/html; charset=utf-8", "<h1>Tïtle</h1><script>no()</script><p>Some <b>words</b>".encode()),
    "/data": ("application/json", b'{"a": 1}'),
    "/image": ("image/png", b"\x89PNG"),
    "/large": ("text/plain", b"x" * 200_000),
    "/bomb": ("text/plain", gzip.compress(b"x" * 50_000_000)),
    "/twice": ("text/plain", gzip.compress(gzip.compress(b"x"))),
    "/punycode": ("text/plain; charset=punycode", "tïtle".encode()),
}


PACKED = {"/bomb": "gzip", "/twice": "gzip, gzip"}


@pytest.fixture(scope="module")
def pages() -> Any:
    server = HTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.mark.parametrize(
    ("path", "is_error", "text"),
    [
        ("/page", False, "Tïtle\nSome words"),
        ("/moved/page", False, "Tïtle\nSome words"),
        ("/data", False, '{"a": 1}'),
        ("/image", True, "status 200, no text but image/png"),
        ("/absent", True, "status 404\nnone"),
        ("/loop", True, "moved more than 5 times"),
    ],
)
async def test_a_page_is_its_text(path: str, is_error: bool, text: str, pages: str, tmp_path: Path) -> None:
    result = await run(tmp_path, "web_fetch", url=pages + path)
    assert (result.is_error, result.text) == (is_error, text)


async def test_a_long_page_is_shortened(pages: str, tmp_path: Path) -> None:
    assert len((await run(tmp_path, "web_fetch", url=pages + "/large")).text) < 40_000


async def test_every_address_on_the_way_to_a_page_is_asked_of_the_policy(pages: str, tmp_path: Path) -> None:
    refused = await run(tmp_path, "web_fetch", url=pages + "/page", policy={"deny_network": ("127.0.0.1",)})
    assert refused.text.startswith("policy_denied")
    rule = pages + "/page"
    moved = await run(tmp_path, "web_fetch", url=pages + "/moved/page", policy={"deny_network": (rule,)})
    assert moved.text.startswith("policy_denied")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://x/y", "http://", "nonsense", "http://127.0.0.1:1/?key=s3cr3t"]
)
async def test_what_cannot_be_fetched_is_an_answer_without_the_address(url: str, tmp_path: Path) -> None:
    result = await run(tmp_path, "web_fetch", url=url)
    assert result.is_error
    assert "s3cr3t" not in result.text


@given(st.text(alphabet="<>/ab c&;#\"'=-!\n", max_size=200))
def test_whatever_stands_in_a_page_its_words_can_be_read(html: str) -> None:
    assert "\n\n" not in readable(html)


async def test_a_question_reaches_the_user(tmp_path: Path) -> None:
    assert (await run(tmp_path, "ask_user", question="which?", options=["a", "b"])).text == "which? a|b"


@pytest.mark.parametrize("piece", ["<", "<a ", "<!--", "</", "<a b='", "<script>", "<b>", "&#", "<script></script>"])
def test_a_page_of_any_length_is_read_in_time(piece: str) -> None:
    began_s = time.monotonic()
    readable(piece * (fetch.PAGE_BYTES_MAX // len(piece)))
    assert time.monotonic() - began_s < 30


def test_the_words_of_a_page_are_what_a_browser_shows() -> None:
    html = "<title>T</title><SCRIPT>x<y</script ><p>a &amp; b, 1 < 2<br>c<!-- <b>no</b> -->d<img alt=x>"
    assert readable(html) == "T\na & b, 1 < 2\ncd"
    assert readable("a<script>for ever") == "a"


async def test_a_page_that_is_packed_without_end_or_twice_is_bounded(pages: str, tmp_path: Path) -> None:
    assert len((await run(tmp_path, "web_fetch", url=pages + "/bomb")).text) < 40_000
    assert "DecodingError" in (await run(tmp_path, "web_fetch", url=pages + "/twice")).text


async def test_a_charset_that_is_none_is_read_as_utf_8(pages: str, tmp_path: Path) -> None:
    assert (await run(tmp_path, "web_fetch", url=pages + "/punycode")).text.startswith("tïtle")
