"""What a guard must find around itself, for a label to claim what bubblewrap was asked for.

Read from bubblewrap's options; how it is outside goes along, so that the guard has something to compare with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from backplane.process.launch import Evidence

_WORDS: Final = {"--bind": 2, "--ro-bind": 2, "--ro-bind-try": 2} | dict.fromkeys(
    ("--dev", "--proc", "--tmpfs", "--remount-ro", "--perms", "--size", "--cap-add", "--cap-drop"), 1
)
"""Words that follow an option; none follows the others we use."""

_UNSHARE: Final = "--unshare-"


def expected(wrapper: Sequence[str]) -> tuple[Evidence, ...]:
    """Work out what must be so inside: other namespaces, mounts that cannot be written, others than lie here.

    Args:
        wrapper: bubblewrap, its options and "--"; empty for none.
    """
    if not wrapper:
        return ()
    options = list(_options(wrapper))
    names = ["mnt", *(option.removeprefix(_UNSHARE) for option, *_ in options if option.startswith(_UNSHARE))]
    closed: dict[str, bool] = {}
    other: dict[str, bool] = {}
    for option, *words in options:
        if option in ("--bind", "--ro-bind", "--ro-bind-try"):
            # The last mount on a place is the one that is seen.
            other[words[1]] = words[0] != words[1]
            closed[words[1]] = option != "--bind" and not other[words[1]]
        elif option in ("--dev", "--proc", "--tmpfs"):
            closed[words[0]], other[words[0]] = False, True
        elif option == "--remount-ro":
            closed[words[0]] = True
    return (
        *(("namespace", name, os.readlink(f"/proc/self/ns/{name}")) for name in names),
        *(("closed", path, "") for path, is_closed in closed.items() if is_closed),
        *_others([path for path, is_other in other.items() if is_other]),
    )


def _options(wrapper: Sequence[str]) -> Iterator[Sequence[str]]:
    at = 1
    while at < len(wrapper) and wrapper[at] != "--":
        end = at + 1 + _WORDS.get(wrapper[at], 0)
        yield wrapper[at:end]
        at = end


def _others(paths: list[str]) -> Iterator[Evidence]:
    for path in paths:
        with suppress(OSError):  # What is not here cannot be seen in there.
            here = os.stat(path)
            yield "other", path, f"{here.st_dev}:{here.st_ino}"
