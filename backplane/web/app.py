"""The routes of the page, each a few lines over `feed`, the runs' doors and the control plane."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from backplane.errors import BackplaneError, ConfigError, unforeseen
from backplane.receipts.memory import Remembered, find
from backplane.receipts.store import Store
from backplane.receipts.tail import LOOK_S
from backplane.runtime import backends
from backplane.runtime.door import AnswerCommand, CancelCommand, Desk, knock, of_run, open_door
from backplane.runtime.orders import make_order
from backplane.runtime.plane import ControlPlane
from backplane.shown import picture_of
from backplane.shown.report import shown_of
from backplane.view import report
from backplane.view.web_files import BODY, CSS, JS
from backplane.web import feed
from backplane.web.guard import STREAMS_MAX

SIDES: Final = 2

BODY_S: Final = 10.0
"""For a request's body to come."""

PAGE: Final = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
    'content="width=device-width, initial-scale=1"><link rel="icon" href="data:,"><title>backplane</title>'
    f"<style>{CSS}</style></head><body>{BODY}<script>{JS}</script></body></html>\n"
)
POLICY: Final = report.policy_of(JS, CSS, "; connect-src 'self'; frame-ancestors 'none'")


class _Answered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer from the page."""

    ask: str
    shown: str
    """Names the question as it stood there (`feed.hash_of`)."""
    decision: Literal["allow", "deny"]
    reason: str = ""
    text: str | None = None
    always: bool = False


class _Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order from the page."""

    task: str
    backend: str
    root: str


class Gone(BackplaneError):
    """The question was answered already, or is another one now."""


class _Stream(StreamingResponse):
    """Lines of JSON until the run or the reader is gone; then what they were read from is closed."""

    def __init__(self, lines: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


class Pages:
    """What the routes share.

    Args:
        plane: starts the orders of the form.
        tasks: hold their runs.
        read_only: nothing is answered, cancelled or started.
    """

    def __init__(
        self, plane: ControlPlane, tasks: anyio.abc.TaskGroup, environ: Mapping[str, str], *, read_only: bool
    ) -> None:
        self._plane, self._tasks, self._environ, self._read_only = plane, tasks, environ, read_only
        self._streams = 0

    def app(self) -> Starlette:
        """The application behind the guard."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/api/runs", _heard(self._runs)),
                Route("/api/runs/{run}/stream", _heard(self._stream)),
                Route("/api/runs/{run}/answer", _heard(self._answer), methods=["POST"]),
                Route("/api/runs/{run}/cancel", _heard(self._cancel), methods=["POST"]),
                Route("/api/report", _heard(self._report)),
                Route("/api/form", _heard(self._form)),
                Route("/api/orders", _heard(self._order), methods=["POST"]),
            ]
        )

    async def _page(self, _request: Request) -> Response:
        return HTMLResponse(PAGE)

    def _store(self) -> Store:
        return Store.open(self._plane.home, readonly=True)

    # Seen -------------------------------------------------------------------------------------------------------------

    async def _runs(self, request: Request) -> Response:
        asked = request.query_params

        def look() -> list[dict[str, Any]]:
            with self._store() as store:
                text = asked.get("text", "")
                return feed.rows(store, text=text, failed=asked.get("failed") == "1", live=asked.get("live") == "1")

        return _json(await anyio.to_thread.run_sync(look))

    async def _stream(self, request: Request) -> Response:
        if self._streams >= STREAMS_MAX:
            raise ConfigError("rate_limit_exceeded", f"{STREAMS_MAX} runs are followed already", hint="close a page")
        self._streams += 1  # Before anything is waited for: a thousand may come at once.
        store = None
        try:
            store = await anyio.to_thread.run_sync(self._store)
            follower = feed.Follower(store, await anyio.to_thread.run_sync(_named, store, request))
        except BaseException:
            self._streams -= 1
            if store is not None:
                store.close()
            raise
        return _Stream(self._lines(follower), partial(self._close, store, follower))

    async def _lines(self, follower: feed.Follower) -> AsyncIterator[bytes]:
        while not follower.is_over:
            for line in await anyio.to_thread.run_sync(follower.look):
                yield line
            await anyio.sleep(LOOK_S)

    def _close(self, store: Store, follower: feed.Follower) -> None:
        self._streams -= 1
        follower.close()
        store.close()

    async def _report(self, request: Request) -> Response:
        names = [name for name in request.query_params.get("runs", "").split(",") if name]
        if not 0 < len(names) <= SIDES:
            raise ConfigError("config_invalid", f"a report has one run or {SIDES}")

        def made() -> str:
            with self._store() as store:
                return "".join(report.page([shown_of(store, find(store, _id(name))) for name in names]))

        whole = await anyio.to_thread.run_sync(made)
        return Response(whole.encode("utf-8", "replace"), media_type="application/octet-stream")

    # Done -------------------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        given = await self._body(request, _Answered)

        def tell() -> str:
            with self._store() as store:
                run = _named(store, request)
                asked = picture_of(store, run).open_asks.get(given.ask)
            if asked is None or feed.hash_of(asked) != given.shown:
                raise Gone("config_invalid", "this question is not open any more, or is another one now")
            answer = AnswerCommand(
                ask=given.ask,
                decision=given.decision,
                reason=given.reason,
                text=given.text,
                remember="run" if given.always else "once",
            )
            return knock(self._plane.home, run.run_id, answer)

        return _json({"done": await anyio.to_thread.run_sync(tell)})

    async def _cancel(self, request: Request) -> Response:
        self._require_hands()
        run_id = _id(request.path_params["run"])
        done = await anyio.to_thread.run_sync(
            knock, self._plane.home, run_id, CancelCommand(reason="cancelled on the page")
        )
        return _json({"done": done})

    async def _form(self, _request: Request) -> Response:
        settings = self._plane.settings
        found = await anyio.to_thread.run_sync(backends.known, settings, self._environ)
        roots = [] if self._read_only else list(settings.web.roots)
        why = (
            "the page is read-only"
            if self._read_only
            else 'no folder is allowed: [web] roots = ["…"] in backplane.toml'
        )
        return _json({"backends": [one.id for one in found if one.ready], "roots": roots, "why": why})

    async def _order(self, request: Request) -> Response:
        wanted = await self._body(request, _Wanted)
        settings = self._plane.settings
        if wanted.root not in settings.web.roots:
            raise ConfigError("config_invalid", "this folder is not in [web] roots", hint="backplane.toml")
        if not wanted.task.strip():
            raise ConfigError("config_invalid", "the task is empty", hint="say in words what to do")
        backend = backends.find(wanted.backend, settings, self._environ)  # By its name here: no command comes in.
        order = make_order(wanted.task, root=wanted.root)
        return _json({"run_id": await self._tasks.start(self._run, order, backend)})

    async def _run(self, order: Any, backend: Any, *, task_status: anyio.abc.TaskStatus[str]) -> None:
        """One run, whose questions wait for an answer from the page or a terminal."""
        desk = Desk(None)
        async with self._plane.start(order, backend, on_ask=desk.answer) as run, anyio.create_task_group() as beside:
            beside.start_soon(open_door, self._plane.home, run.id, of_run(run, desk))
            task_status.started(run.id)
            async for _ in run.batches():
                pass
            beside.cancel_scope.cancel()

    def _require_hands(self) -> None:
        if self._read_only:
            raise ConfigError("policy_denied", "this page is read-only", hint="backplane web without --read-only")

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        self._require_hands()
        try:
            with anyio.fail_after(BODY_S):
                return msgspec.json.decode(await request.body(), type=kind)
        except TimeoutError as error:
            raise ConfigError("config_invalid", f"the body did not come within {BODY_S:g} s") from error
        except msgspec.MsgspecError as error:
            raise ConfigError("config_invalid", f"the body is not as the page sends it: {error}") from error


def _named(store: Store, request: Request) -> Remembered:
    return find(store, _id(request.path_params["run"]))


def _id(name: str) -> str:
    """A run's id; nothing else goes near a path."""
    try:
        return str(uuid.UUID(name))
    except ValueError as error:
        raise ConfigError("config_invalid", "this is no run's id") from error


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _heard(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The route, with its errors as JSON: code, fact, next step."""

    async def answered(request: Request) -> Response:
        try:
            return await route(request)
        except Exception as error:
            known = unforeseen(error)
            status = 409 if isinstance(known, Gone) else _STATUS.get(known.code, 400)
            told = {"code": known.code, "message": known.message, "hint": known.hint}
            return Response(msgspec.json.encode(told), status, media_type="application/json")

    return answered


_STATUS: Final = {"internal": 500, "rate_limit_exceeded": 429, "policy_denied": 403, "receipt_store_failed": 404}
