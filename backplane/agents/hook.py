"""Hook program: forwards the question of an agent's hook, on stdin, to our host's socket, and the answer to stdout.

Without an answer the call is denied. The program starts at every tool call, so it imports only fast standard modules.
"""

import os
import socket
import sys

SOCKET = "BACKPLANE_AGENT_HOOKS"
"""Variable with the socket's path: an argument would change the command that the agent trusts."""
EXIT = "BACKPLANE_AGENT_HOOKS_EXIT"
"""Variable with the exit code that stops a tool if no answer came, for an agent that does not read a JSON answer."""
ANSWER_S_MAX = 320
"""Seconds to wait for the answer: above the 300 s that a host itself waits for one."""
DENIED = b'{"decision":"block","reason":"policy_denied: nobody answered"}'
"""Answer, before or after a tool, if the host gives none."""


def main() -> int:
    """Ask, and print the answer. With any exit code but 0 and `EXIT` the agent would run the call."""
    try:
        answer = ask(os.environ[SOCKET])
    except (OSError, KeyError):
        answer = b""
    if not answer and EXIT in os.environ:
        os.write(2, b"policy_denied: nobody answered")
        return int(os.environ[EXIT])
    sys.stdout.buffer.write(answer or DENIED)
    sys.stdout.buffer.flush()
    return 0


def ask(path: str) -> bytes:
    """Return the host's answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(ANSWER_S_MAX)
        line.connect(path)
        line.sendall(sys.stdin.buffer.read())
        line.shutdown(socket.SHUT_WR)
        with line.makefile("rb") as answer:
            return answer.read()


if __name__ == "__main__":
    sys.exit(main())
