"""What such an agent starts before and after a tool: its question goes to our host, and the host's answer back to it.

A program of its own: what is asked comes on stdin and goes to a socket as it is; what comes from there goes to stdout.
Where no answer comes, what was asked about is denied. Only built-in modules, as each is paid at every call of a tool.
"""

import _socket  # `socket` costs 25 ms
import posix  # `os` costs 1.5 ms
import sys

SOCKET = "BACKPLANE_AGENT_HOOKS"
"""Variable with the socket's path: in an argument it would change what the agent was told to trust."""

ANSWER_S_MAX = 320
"""For the answer: above the 300 s that a host itself waits for one."""

READ_BYTES_MAX = 64 * 1024
"""One read: the size of a pipe's buffer."""

EXIT = "BACKPLANE_AGENT_HOOKS_EXIT"
"""Variable with the exit code that stops a tool where no answer came, for an agent that takes no word for it."""

DENIED = b'{"decision":"block","reason":"policy_denied: nobody answered"}'
"""Of a tool that is to run, and of what one has said alike."""


def main() -> int:
    """Put the question; 0, as any other exit but `EXIT` would let the agent go on."""
    try:
        answer = asked(posix.environ[SOCKET.encode()])
    except (OSError, KeyError):
        answer = b""
    code = posix.environ.get(EXIT.encode())
    if not answer and code is not None:
        posix.write(2, b"policy_denied: nobody answered")
        return int(code)
    answer = answer or DENIED
    while answer:
        answer = answer[posix.write(1, answer) :]
    return 0


def asked(path: bytes) -> bytes:
    """The host's answer; raises OSError."""
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    line.settimeout(ANSWER_S_MAX)
    line.connect(path)
    while data := posix.read(0, READ_BYTES_MAX):
        while data:
            data = data[line.send(data) :]
    line.shutdown(_socket.SHUT_WR)
    answer = b""
    while data := line.recv(READ_BYTES_MAX):
        answer += data
    return answer


if __name__ == "__main__":
    sys.exit(main())
