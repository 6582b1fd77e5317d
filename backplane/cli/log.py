"""`run --log-file`: a line of JSON for each thing that happens, for programs that collect logs; no text of anybody."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from backplane.cli.start import wrong
from backplane.contract.events import AgentEvent, carried

if TYPE_CHECKING:
    from backplane.runtime.run import Run

LEVELS = {"Failed": "error", "Warned": "warning", "RetryReported": "warning"}


class RunLog:
    """A log file, opened before the run and appended to.

    Args:
        path: of the file.

    Raises:
        ConfigError: `config_invalid`, it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise wrong(f"--log-file {path!r}: {why}", "name a file to write to") from error
        self._number = 0
        self.failed: str | None = None
        """Why lines are missing; None while all were written."""

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def begin(self, run: Run) -> None:
        """Say that a run begins."""
        from backplane.runtime.inbound import now

        self._number = 0
        self._put([{"ts": now(), "level": "info", "run": run.id, "what": "run", "backend": run.backend_id}])

    def events(self, run_id: str, events: Iterable[AgentEvent]) -> None:
        """Add events: what each is, and the tool, code or count that names it, never its texts."""
        self._put([self._line(run_id, carried(event)) for event in events])

    def _line(self, run_id: str, event: AgentEvent) -> dict[str, Any]:
        self._number += 1
        kind = type(event).__name__
        level = LEVELS.get(kind, "debug" if kind in ("AssistantDelta", "Reasoning", "OutputReported") else "info")
        line = {"ts": event.ts, "level": level, "run": run_id, "event": self._number, "what": kind}
        for name in ("tool_name", "tool_use_id", "is_error", "exit_code", "error_code", "path"):
            value = getattr(event, name, None)
            if value is not None and value is not msgspec.UNSET:
                line[name] = value
        body = getattr(event, "body", None)
        if isinstance(body, dict):
            line |= {name: body[name] for name in ("id", "kind", "decision", "by") if isinstance(body.get(name), str)}
        return line

    def end(self, run: Run) -> None:
        """Say how a run ended."""
        meta, end = run.receipt.meta, run.end
        line: dict[str, Any] = {
            "ts": meta.finished_at,
            "level": "info" if run.error is None else "error",
            "run": run.id,
        }
        line |= {"what": "end", "outcome": run.receipt.outcome, "duration_ms": meta.duration_ms}
        line |= {} if end is None else end.to_wire()
        self._put([{**line, "receipt_sha256": run.receipt.receipt_sha256}])

    def _put(self, lines: list[dict[str, Any]]) -> None:
        try:
            os.write(self._fd, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        except OSError as error:  # A full disk of the log's is no affair of the run's.
            self.failed = self.failed or error.strerror
