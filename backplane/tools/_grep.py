"""Looks through the lines of files; a program of its own, so that it can be stopped.

What to look for comes as JSON on stdin, `file:line:text` goes out. Uses nothing of ours.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys

FILE_BYTES_MAX = 8 * 1024 * 1024
LINE_CHARS_MAX = 400
"""Shown of a line: minified files have lines of megabytes."""
SNIFFED_BYTES = 8192


def content(root: str, name: str) -> bytes:
    """The text of a file, folder by folder without following a link; nothing for one that is no text."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    *folders, last = name.split("/")
    try:
        for flags, part in [*((os.O_DIRECTORY, folder) for folder in folders), (os.O_NONBLOCK, last)]:
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=fd)
            os.close(fd)
            fd = inner
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > FILE_BYTES_MAX:
            return b""
        data = bytearray()
        while chunk := os.read(fd, 1 << 20):
            data += chunk
    finally:
        os.close(fd)
    return b"" if b"\0" in data[:SNIFFED_BYTES] else bytes(data)


def say(line: str) -> None:
    sys.stdout.buffer.write(line.encode("utf-8", "backslashreplace") + b"\n")


def main() -> None:
    asked = json.load(sys.stdin.buffer)
    try:
        pattern = re.compile(asked["pattern"], re.IGNORECASE if asked["ignore_case"] else 0)
    except (re.error, OverflowError, RecursionError) as error:
        say(f"the pattern cannot be read: {error}")
        sys.exit(2)
    left = asked["matches_max"]
    for name in asked["files"]:
        try:
            text = content(asked["root"], name).decode("utf-8", "replace")
        except OSError:
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if pattern.search(line):
                if not left:
                    say(f"[more than {asked['matches_max']} lines match; narrow the pattern]")
                    return
                left -= 1
                say(f"{name}:{number}:{line[:LINE_CHARS_MAX]}")


if __name__ == "__main__":
    main()
