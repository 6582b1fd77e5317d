"""Names of hosts looked up in threads of our own: a resolver that hangs holds nobody else up, nor the end of a run.

The loop's own threads would be shared by all runs, and its end waits for each of them.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import deque
from typing import Final

import anyio

LOOKUPS_MAX: Final = 8
"""At once for one run; the next wait. A resolver may take half a minute, and its thread cannot be stopped."""

Address = tuple[int, tuple[str | int, ...]]
"""A family and what is connected to."""


class _Question:
    def __init__(self, host: str, port: int, asked: socket.socket) -> None:
        self.host = host
        self.port = port
        self.answer: list[Address] | Exception = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._asked = asked
        """Closed when the answer is there, or never will be: so the other end becomes readable."""

    def look(self) -> None:
        """Ask the system's resolver. Blocks."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            # A Python without IPv6 gives such addresses as numbers.
            self.answer = [(family, where) for family, _, _, _, where in found if isinstance(where[0], str)]
        except (OSError, UnicodeError) as error:
            self.answer = error
        finally:
            self.close()

    def close(self) -> None:
        self._asked.close()


class Resolver:
    """The names of one run. Whoever waits no more leaves a thread behind that ends with its resolver's answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting: deque[_Question] = deque()

    async def look_up(self, host: str, port: int) -> list[Address]:
        """The addresses of a name, in the resolver's order.

        Raises:
            OSError: there are none, or no thread can be had.
            UnicodeError: it is no name.
        """
        ours, theirs = socket.socketpair()
        question = _Question(host, port, theirs)
        with ours:
            try:
                self._put(question)
                await anyio.wait_readable(ours)
            finally:
                self._take_back(question)
                anyio.notify_closing(ours)
        if isinstance(question.answer, Exception):
            raise question.answer
        return question.answer

    def _put(self, question: _Question) -> None:
        with self._lock:
            if self._threads >= LOOKUPS_MAX:
                self._waiting.append(question)
                return
            try:
                threading.Thread(target=self._work, args=(question,), name="names", daemon=True).start()
            except RuntimeError:  # None can be had: the answer stays as it is.
                question.close()
                return
            self._threads += 1

    def _take_back(self, question: _Question) -> None:
        with self._lock:
            if question in self._waiting:
                self._waiting.remove(question)
                question.close()

    def _work(self, question: _Question) -> None:
        while True:
            question.look()
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                question = self._waiting.popleft()
