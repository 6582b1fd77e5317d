"""The routes of the desk: they read `feed`, send commands to live runs, and apply or rewind results."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from backplane.errors import BackplaneError, ConfigError, unforeseen
from backplane.receipts.memory import find
from backplane.receipts.store import Store
from backplane.runtime.door import AnswerCommand, CancelCommand, knock
from backplane.runtime.results import Wish, apply_result, rewind_result
from backplane.runtime.state import StateFolder
from backplane.view import page
from backplane.view.ended import names
from backplane.view.load import picture_of, shown_of
from backplane.web import feed
from backplane.workspace import Applied

CSS: Final = page.CSS + page.asset("desk.css", "backplane.web")
JS: Final = page.asset("desk.js", "backplane.web")
_POLICY: Final = page.policy_of(JS, CSS, "; connect-src 'self'")
POLICY: Final = f"{_POLICY}; frame-ancestors 'none'"
DESK: Final = (
    page.head_of("backplane", CSS, _POLICY) + page.asset("desk.html", "backplane.web") + f"<script>{JS}</script></html>"
)


class FormFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the desk's forms; each form has some of them."""

    ask: str = ""
    number: int = 0
    """Number of the question's event: a host may ask something else under the same id."""
    decision: Literal["allow", "deny"] = "deny"
    words: str = ""
    """The answer to a question in words, else the reason."""
    always: bool = False
    check: bool = False
    merge: bool = False
    accept_violations: bool = False
    to: str = "start"
    """The checkpoint to rewind to."""


Act = Callable[[str, FormFields], str]


class Routes:
    """The routes of one server; Starlette calls those without `async` in a thread.

    Args:
        read_only: refuse to answer, cancel, apply and rewind.
    """

    def __init__(self, home: Path, *, read_only: bool) -> None:
        self._home, self._read_only = home, read_only

    def app(self) -> Starlette:
        """Return the application; `Guard` goes in front of it."""
        acts: tuple[Act, ...] = (self.answer, self.cancel, self.apply, self.rewind)
        return Starlette(
            routes=[
                Route("/", self._desk),
                Route("/run/{run}", self._desk),
                Route("/gateway", self._desk),
                Route("/gateway/{exchange}", self._desk),
                Route("/api/runs", self._runs),
                Route("/api/exchanges", self._exchanges),
                Route("/api/exchange/{exchange}", self._exchange),
                Route("/api/run/{run}/rows", self._rows),
                Route("/api/run/{run}/report", self._report),
                *(Route(f"/api/run/{{run}}/{act.__name__}", self._route(act), methods=["POST"]) for act in acts),
            ],
            exception_handlers={BackplaneError: _failed, Exception: _failed},
        )

    def _desk(self, _request: Request) -> Response:
        return HTMLResponse(DESK)

    def _runs(self, request: Request) -> Response:
        asked = [request.query_params.get(name, "") for name in ("text", "state")]
        return _json(feed.runs(self._home, *asked))

    def _exchanges(self, request: Request) -> Response:
        asked = [request.query_params.get(name, "") for name in ("text", "state")]
        return _json(feed.exchanges(self._home, *asked))

    def _exchange(self, request: Request) -> Response:
        return _json(feed.exchange(self._home, _id(request, "exchange")))

    def _rows(self, request: Request) -> Response:
        with Store.open(self._home, readonly=True) as store:
            run = find(store, _id(request))
        lines = feed.follow(self._home, run, read_only=self._read_only)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    def _report(self, request: Request) -> Response:
        with Store.open(self._home, readonly=True) as store:
            whole = "".join(page.page([shown_of(store, find(store, _id(request)))]))
        return Response(whole.encode("utf-8", "replace"), media_type="application/octet-stream")

    def _route(self, act: Act) -> Callable[[Request], Awaitable[Response]]:
        """Return the route of an action on a run; its response says what was done."""

        async def done(request: Request) -> Response:
            if self._read_only:
                raise ConfigError(
                    "policy_denied", "this page is read-only", hint="restart `backplane web` without --read-only"
                )
            try:
                given = msgspec.json.decode(await request.body(), type=FormFields, strict=False)
            except msgspec.MsgspecError as error:
                raise ConfigError("config_invalid", f"cannot read the request body: {error}") from error
            return _json({"done": await run_in_threadpool(act, _id(request), given)})

        return done

    def answer(self, run_id: str, given: FormFields) -> str:
        with Store.open(self._home, readonly=True) as store:
            asked = picture_of(store, find(store, run_id)).open_asks.get(given.ask)
        if asked is None or asked.number != given.number:
            raise ConfigError("config_invalid", "this question is no longer open")
        is_text = asked.kind == "input" and given.decision == "allow"
        answer = AnswerCommand(
            ask=given.ask,
            decision=given.decision,
            reason="" if is_text else given.words,
            text=given.words if is_text else None,
            remember="run" if given.always else "once",
        )
        return knock(self._home, run_id, answer)

    def cancel(self, run_id: str, given: FormFields) -> str:
        return knock(self._home, run_id, CancelCommand(reason="cancelled on the web page"))

    def apply(self, run_id: str, given: FormFields) -> str:
        wish = Wish(check=given.check, merge=given.merge, accept_violations=given.accept_violations)
        return _changed(apply_result(StateFolder(self._home), run_id, wish), given)

    def rewind(self, run_id: str, given: FormFields) -> str:
        return _changed(rewind_result(StateFolder(self._home), run_id, given.to, check=given.check), given)


def _changed(done: Applied, given: FormFields) -> str:
    return ": ".join(filter(None, (done.describe(is_check=given.check), names(done.files))))


def _id(request: Request, kind: str = "run") -> str:
    """Return the id of the request's run or exchange; only a UUID is looked up on disk."""
    try:
        return str(uuid.UUID(request.path_params[kind]))
    except ValueError as error:
        raise ConfigError("config_invalid", f"the address has no {kind} id") from error


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _failed(_request: Request, error: Exception) -> Response:
    """Return an error as JSON: code, fact, next step."""
    known = unforeseen(error)
    body = {"code": known.code, "message": known.message, "hint": known.hint}
    return _json(body, _STATUS.get(known.code, 400))


_STATUS: Final = {"internal": 500, "policy_denied": 403, "execution_workspace_error": 409, "receipt_store_failed": 404}
