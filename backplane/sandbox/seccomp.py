"""The filter on system calls, for orders that ask for it: what no agent's work needs, and attacks do.

The program is the kernel's classic BPF: it looks at machine and number, and answers EPERM. Of `clone` it looks at the
flags: no new namespaces. Those of `clone3` lie where no filter can look, so that one is not there (ENOSYS), and
libraries take `clone`. Sandboxes that a host would build itself, debuggers and `io_uring` do not work behind it; most
programs never notice.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

_SAME: Final = {
    # Numbered alike everywhere since Linux 5.1.
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "open_tree_attr": 467,
}

_CLONE3: Final = 435
_NEW_NAMESPACES: Final = 0x7E020000
"""Flags of `clone`: mounts, cgroups, names, IPC, users, processes, network. That of clocks is `clone3`'s alone."""

_X86_64: Final = {
    "ptrace": 101,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "kexec_load": 246,
    "kexec_file_load": 320,
    "init_module": 175,
    "finit_module": 313,
    "delete_module": 176,
    "bpf": 321,
    "perf_event_open": 298,
    "userfaultfd": 323,
    "syslog": 103,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "open_by_handle_at": 304,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "chroot": 161,
    "setns": 308,
    "unshare": 272,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "acct": 163,
    "quotactl": 179,
    "settimeofday": 164,
    "clock_settime": 227,
    "clock_adjtime": 305,
    "adjtimex": 159,
    "iopl": 172,
    "ioperm": 173,
    "modify_ldt": 154,
}

_AARCH64: Final = {
    "ptrace": 117,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "kexec_load": 104,
    "kexec_file_load": 294,
    "init_module": 105,
    "finit_module": 273,
    "delete_module": 106,
    "bpf": 280,
    "perf_event_open": 241,
    "userfaultfd": 282,
    "syslog": 116,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "open_by_handle_at": 265,
    "mount": 40,
    "umount2": 39,
    "pivot_root": 41,
    "chroot": 51,
    "setns": 268,
    "unshare": 97,
    "swapon": 224,
    "swapoff": 225,
    "reboot": 142,
    "acct": 89,
    "quotactl": 60,
    "settimeofday": 170,
    "clock_settime": 112,
    "clock_adjtime": 266,
    "adjtimex": 171,
}


class Machine(msgspec.Struct, frozen=True):
    """What the kernel calls a machine, and the calls that are refused there."""

    audit: int
    clone: int
    refused: dict[str, int]


MACHINES: Final[Mapping[str, Machine]] = MappingProxyType(
    {
        "x86_64": Machine(0xC000003E, 56, _X86_64 | _SAME),
        "aarch64": Machine(0xC00000B7, 220, _AARCH64 | _SAME),
    }
)
"""Numbers from the kernel's tables, `arch/*/entry/syscalls` and `include/uapi/asm-generic/unistd.h`, of Linux 6.12."""

_X32: Final = 0x40000000
"""From here on x86_64 has a second set of numbers for the same calls."""

_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _FLAGS_AT = 0, 4, 16
_ANSWERS: Final = {"allow": 0x7FFF0000, "refuse": 0x00050000 | errno.EPERM, "absent": 0x00050000 | errno.ENOSYS}

_Step = tuple[int, str, str, int]
"""What to do, the answers to jump to when it holds and when not, and a value; no answer goes on with the next step."""


def program(machine: str = os.uname().machine) -> bytes | None:
    """The filter for a machine; None where its numbers are not known."""
    found = MACHINES.get(machine)
    if found is None:
        return None
    steps: list[_Step] = [
        (_LOAD, "", "", _MACHINE_AT),
        (_EQUAL, "", "refuse", found.audit),
        (_LOAD, "", "", _NUMBER_AT),
        (_AT_LEAST, "refuse", "", _X32),
        *((_EQUAL, "refuse", "", number) for number in sorted(found.refused.values())),
        (_EQUAL, "absent", "", _CLONE3),
        (_EQUAL, "", "allow", found.clone),
        (_LOAD, "", "", _FLAGS_AT),
        (_HAS, "refuse", "allow", _NEW_NAMESPACES),
    ]
    places = {name: len(steps) + number for number, name in enumerate(_ANSWERS)}
    packed = [
        struct.pack("HBBI", code, *(places.get(answer, at + 1) - at - 1 for answer in (yes, no)), value)
        for at, (code, yes, no, value) in enumerate(steps)
    ]
    return b"".join(packed + [struct.pack("HBBI", _RETURN, 0, 0, answer) for answer in _ANSWERS.values()])
