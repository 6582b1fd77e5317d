"""The filter on system calls, for orders that ask for it: what no agent's work needs, and attacks do.

The program is the kernel's classic BPF: it looks at machine and number, and answers EPERM. Sandboxes that
a host would build itself, debuggers and `io_uring` do not work behind it; most programs never notice.
"""

from __future__ import annotations

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
}

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
    refused: dict[str, int]


MACHINES: Final[Mapping[str, Machine]] = MappingProxyType(
    {
        "x86_64": Machine(0xC000003E, _X86_64 | _SAME),
        "aarch64": Machine(0xC00000B7, _AARCH64 | _SAME),
    }
)
"""Numbers from the kernel's tables, `arch/*/entry/syscalls` and `include/uapi/asm-generic/unistd.h`, of Linux 6.12."""

_X32: Final = 0x40000000
"""From here on x86_64 has a second set of numbers for the same calls."""

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT = 0, 4
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001


def program(machine: str = os.uname().machine) -> bytes | None:
    """The filter for a machine; None where its numbers are not known."""
    found = MACHINES.get(machine)
    if found is None:
        return None
    numbers = sorted(found.refused.values())
    last = len(numbers) + 1  # Steps from the first comparison of a number to the answer "no".
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 0, last + 2, found.audit),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, last, 0, _X32),
    ]
    steps += [(_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
