"""The guard: a small program that starts one host, watches it, and kills all its processes at the end.

The guard is the subreaper of everything that the host starts: even a process that forks twice and leaves its session
becomes the guard's child. The control plane commands the guard over a socket, and the guard reports over the same one.
When the socket or the control plane ends, the guard kills everything. `process.spawn` starts the guard; other modules
read the process table by its functions. It prefers built-in modules, because every import delays every run.
"""

import _signal  # type: ignore[import-not-found]  # `signal` spends 5 ms on its enums
import marshal
import posix  # `os` costs 1.5 ms
import select
import sys
import time

SWEEP_S_MAX = 60.0
"""Seconds to kill all descendants. A process tree takes some ms, a process in uninterruptible sleep longer; the control
plane has a shorter limit of its own, and does not wait for this one."""

LOOK_S = 0.005
"""Seconds between two reads of the process table, unless a death is reported sooner."""

WORD_BYTES_MAX = 64
"""Maximum length in bytes of a message on the socket."""

DEATHS_BYTES_MAX = 4096
"""Maximum number of deaths in one read, a byte each; further ones cause another read."""

UMASK = 0o077
"""Umask of a host: only its user can access the files that it makes."""

DEFAULT_PATH = b"/bin:/usr/bin"
"""Folders to search for a program if its environment has no PATH."""

CODE_NOT_STARTED = 127
"""Exit code of a child that could not start the program; shells use the same."""

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

RLIMIT_BYTES = 8
"""Size in bytes of each limit, soft or hard, in the kernel's structure."""

PIDFD_OPEN = 434
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""Numbers of system calls; the same on every architecture except alpha."""
LANDLOCK_BENEATH, LANDLOCK_PORT = 1, 2
"""Kinds of Landlock rules."""

CONNECTIONS_WAITING_MAX = 64
"""Limit of connections that wait for the proxy to accept them; a browser opens six at once."""


PARENT, GROUP, SESSION, STATE, START = range(5)
"""Indexes of a process table row; the start is in clock ticks since boot."""

ZOMBIE = ord("Z")
"""State of a process that has ended and has not been reaped."""


def look() -> "dict[int, tuple[int, int, int, int, int]]":
    """Return the process table: pid → parent, group, session, state, start."""
    return {pid: seen for name in posix.listdir("/proc") if name.isdigit() and (seen := look_at(pid := int(name)))}


def look_at(pid: int) -> "tuple[int, int, int, int, int] | None":
    """Return one row of the process table; None if there is no such process."""
    try:
        fd = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return None
    try:
        row = posix.read(fd, 4096)
    except OSError:  # The process ended between the two calls.
        return None
    finally:
        posix.close(fd)
    # The second field is a name that the host chooses, and may contain blanks and brackets.
    fields = row[row.rindex(b")") + 2 :].split()
    return int(fields[1]), int(fields[2]), int(fields[3]), fields[0][0], int(fields[19])


def descendants(table: "dict[int, tuple[int, int, int, int, int]]", roots: "set[int]") -> "set[int]":
    """Return the processes `roots` and all their descendants."""
    children: dict[int, list[int]] = {}
    for pid, row in table.items():
        children.setdefault(row[PARENT], []).append(pid)
    found, waiting = set(roots), list(roots)
    while waiting:
        fresh = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
        found.update(fresh)
        waiting += fresh
    return found


def pidfd_open(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends.

    `os` has this call only if Python was compiled with headers of Linux 5.3; some builds for old systems lack it.
    """
    if hasattr(posix, "pidfd_open"):
        return posix.pidfd_open(pid)
    fd = _libc("syscall", PIDFD_OPEN, pid, 0)
    if fd < 0:
        raise OSError(38, "no pidfd_open")
    return fd


def main(control: int, order: int) -> None:
    """Read the order, start the host, and return once all its processes are gone.

    The order is a file with a marshalled tuple (argv, env, cwd, cage). The cage's members may be missing or None:
    `held` (start the host only at "go"), `plane` (the control plane's pidfd, in the first process of a namespace),
    `stdio` (the host's three descriptors under other numbers), `door` (the socket over which to send a listening one,
    and the port to listen on), `limits` (numbers and values) and `landlock` (arguments of `confine`).

    The guard writes "pid PID START" or "spawn_error WHERE ERRNO", then "exit CODE" or "signal NUMBER", and at the end
    "swept COUNT". It reads "go" if `held` is set, then "term" and "kill".
    """
    argv, env, cwd, cage = marshal.loads(posix.pread(order, posix.fstat(order).st_size, 0))
    posix.close(order)
    posix.set_inheritable(control, False)
    for number in (_signal.SIGINT, _signal.SIGHUP, _signal.SIGTERM, _signal.SIGQUIT):
        _signal.signal(number, _signal.SIG_IGN)
    # Otherwise a host of the same user could read our memory or take our socket, and write in our name.
    _libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    # A pidfd reports the control plane's death even if a forked copy keeps the socket open.
    if "plane" in cage:
        plane = cage["plane"]
        posix.set_inheritable(plane, False)
        # The orphans of our namespace become our children, and the kernel kills the whole namespace when we end.
        # Bubblewrap's `--die-with-parent` acts too early: if it kills bubblewrap right after its fork, we never end.
        _libc("prctl", PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    else:
        plane = pidfd_open(posix.getppid())
        if _libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            _write(control, b"spawn_error subreaper 0")
            return
    if cage.get("door"):
        _send_door(*cage["door"])
    stdio = cage.get("stdio", ())
    for fd in stdio:
        posix.set_inheritable(fd, False)
    if cage.get("held") and not _is_released(control, plane):
        _write(control, b"swept 0")
        return
    host, fault = _start(argv, env, cwd, cage)
    _close_pipes(stdio)
    if fault:
        _write(control, b"spawn_error " + fault)
        return
    try:
        row = look_at(host)
        _write(control, b"pid %d %d" % (host, row[START] if row else 0))
        _serve(control, plane, host)
    finally:
        _write(control, b"swept %d" % _sweep(control, host))


def _start(
    argv: "list[bytes]", env: "dict[bytes, bytes]", cwd: "bytes | None", cage: "dict[str, object]"
) -> "tuple[int, bytes]":
    """Fork and start the host; return its pid and any "WHERE ERRNO"."""
    reader, writer = posix.pipe()
    me = posix.getpid()
    host = posix.fork()
    if host == 0:
        _become(argv, env, cwd, cage, writer, me)
    posix.close(writer)
    fault = posix.read(reader, WORD_BYTES_MAX)  # Empty if exec closed the other end.
    posix.close(reader)
    if fault:
        posix.waitpid(host, 0)  # Reap it ourselves, because our own parent may not reap orphans.
    return host, fault


def _become(
    argv: "list[bytes]",
    env: "dict[bytes, bytes]",
    cwd: "bytes | None",
    cage: "dict[str, object]",
    writer: int,
    guard: int,
) -> None:
    """Turn this process into the host, in a session of its own; on failure write "WHERE ERRNO" and exit."""
    where = b"exec"
    try:
        # A hostile host may kill its guard; then the kernel kills the host.
        _libc("prctl", PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if posix.getppid() != guard:
            posix._exit(CODE_NOT_STARTED)
        posix.setsid()
        posix.umask(UMASK)
        for place, fd in enumerate(cage.get("stdio", ())):  # type: ignore[arg-type, var-annotated]  # a tuple
            posix.dup2(fd, place)
        if cwd is not None:
            where = b"cwd"
            posix.chdir(cwd)
        for number, most in cage.get("limits", ()):  # type: ignore[attr-defined]  # pairs
            where = b"limits"
            if _libc("setrlimit", number, most.to_bytes(RLIMIT_BYTES, sys.byteorder) * 2) != 0:
                raise OSError(1, "setrlimit")
        if cage.get("landlock"):
            where = b"landlock"
            confine(*cage["landlock"])  # type: ignore[misc]  # its arguments
        where = b"exec"
        _reset_signals()
        _execute(argv, env)
    except (OSError, ValueError) as fault:  # ValueError: a zero byte in an argument.
        posix.write(writer, b"%s %d" % (where, getattr(fault, "errno", None) or 22))
    finally:
        posix._exit(CODE_NOT_STARTED)


def _reset_signals() -> None:
    """Reset every signal to its default, because the host must not ignore signals that the control plane ignores."""
    for number in _signal.valid_signals():
        if number not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _execute(argv: "list[bytes]", env: "dict[bytes, bytes]") -> None:
    """Replace this process by the program. Raises OSError."""
    if b"/" in argv[0]:
        posix.execve(argv[0], argv, env)
    failure: OSError = FileNotFoundError(2, "not in PATH")
    for folder in env.get(b"PATH", DEFAULT_PATH).split(b":"):
        try:
            posix.execve((folder or b".") + b"/" + argv[0], argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as fault:
            failure = fault  # Report a file that cannot be run, rather than a folder without the file.
    raise failure


def confine(ruleset: bytes, rights: int, file_rights: int, paths: "list[bytes]", ports: "list[bytes]") -> None:
    """Restrict this process and all that it starts by Landlock: guarded rights remain on these paths and ports only.

    Args:
        ruleset: the kernel's structure of the guarded rights.
        rights: rights that remain below each folder; on a path that is no folder, `file_rights` remain.
        paths: files and folders; a missing one is skipped.
        ports: the kernel's structures for the TCP ports that stay open.

    Raises:
        OSError: the kernel refused the restriction.
    """
    guarded = _landlock(LANDLOCK_CREATE_RULESET, ruleset, len(ruleset), 0)
    for path in paths:
        try:
            fd = posix.open(path, posix.O_PATH | posix.O_CLOEXEC)
        except FileNotFoundError:
            continue
        is_folder = posix.fstat(fd).st_mode & 0o170000 == 0o040000
        kept = rights if is_folder else file_rights
        rule = kept.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        _landlock(LANDLOCK_ADD_RULE, guarded, LANDLOCK_BENEATH, rule, 0)
        posix.close(fd)
    for port in ports:
        _landlock(LANDLOCK_ADD_RULE, guarded, LANDLOCK_PORT, port, 0)
    if _libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(1, "no_new_privs")
    _landlock(LANDLOCK_RESTRICT_SELF, guarded, 0)
    posix.close(guarded)


def _landlock(*arguments: "int | bytes") -> int:
    answer = _libc("syscall", *arguments)
    if answer < 0:
        raise OSError(1, "landlock")
    return answer


def _is_released(control: int, plane: int) -> bool:
    """Wait for "go"; return False if another command came, or the socket or the control plane ended."""
    events = select.poll()
    for fd in (control, plane):
        events.register(fd, select.POLLIN)
    return all(fd == control for fd, _ in events.poll()) and _read(control) == b"go"


def _send_door(line: int, port: int) -> None:
    """Listen on a port of our own network namespace, and send the socket to the control plane outside."""
    import _socket

    door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    door.bind(("127.0.0.1", port))
    door.listen(CONNECTIONS_WAITING_MAX)
    to = _socket.socket(fileno=line)
    to.sendmsg((b"door",), ((_socket.SOL_SOCKET, _socket.SCM_RIGHTS, door.fileno().to_bytes(4, sys.byteorder)),))
    to.close()
    door.close()


def _close_pipes(stdio: "tuple[int, ...]") -> None:
    """Close our copies of the host's descriptors; otherwise they would stay open after the host has closed them."""
    nothing = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    for fd in (0, 1, 2):
        posix.dup2(nothing, fd)
    for fd in stdio:
        posix.close(fd)


def _serve(control: int, plane: int, host: int) -> None:
    """Report the host's end and forward "term", until "kill" arrives, or the socket or the control plane ends."""
    ended, orphaned = pidfd_open(host), _deaths()
    events = select.poll()
    for fd in (control, plane, ended, orphaned):
        events.register(fd, select.POLLIN)
    while True:
        for fd, _ in events.poll():
            if fd == ended:
                events.unregister(ended)
                # The host stays a zombie until the sweep, so that no other process can get its pid or its group.
                seen = posix.waitid(posix.P_PID, host, posix.WEXITED | posix.WNOWAIT)
                assert seen is not None  # Only a call with WNOHANG returns None.
                _write(control, b"%s %d" % (b"exit" if seen.si_code == posix.CLD_EXITED else b"signal", seen.si_status))
            elif fd == orphaned:
                posix.read(orphaned, DEATHS_BYTES_MAX)
                _reap_orphans(host)
            elif fd == plane or _read(control) != b"term":
                return
            else:
                _signal_group(host, _signal.SIGTERM)
                _signal_group(host, _signal.SIGCONT)


def _deaths() -> int:
    """Return a descriptor that becomes readable when one of our children ends.

    A handler that reaps could be interrupted by the next death, whose handler would reap the same child.
    """
    reader, writer = posix.pipe2(posix.O_NONBLOCK | posix.O_CLOEXEC)
    _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    return reader


def _reap_orphans(host: int) -> None:
    flags = posix.WEXITED | posix.WNOHANG | posix.WNOWAIT
    while (seen := posix.waitid(posix.P_ALL, 0, flags)) and seen.si_pid != host:
        posix.waitpid(seen.si_pid, 0)


def _sweep(control: int, host: int) -> int:
    """Kill until no child is left; return how many descendants of the host were killed.

    A process whose parent dies becomes our child, so "no child" proves "no descendant", however fast they fork.
    A child that we have not reaped keeps its pid, so we cannot kill another process by mistake.
    """
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGCHLD,))
    end_s = time.monotonic() + SWEEP_S_MAX
    _signal_group(host, _signal.SIGKILL)
    swept, left = _reap(control, host)
    if left:  # The group needs a moment to die; usually nothing else is left.
        _signal.sigtimedwait((_signal.SIGCHLD,), LOOK_S)
    while left and time.monotonic() < end_s:
        killed, left = _reap(control, host)
        swept += killed
        if left:
            _kill_children()
            _signal.sigtimedwait((_signal.SIGCHLD,), LOOK_S)
    return swept


def _reap(control: int, host: int) -> "tuple[int, bool]":
    """Reap ended children; return how many of them, the host excluded, were killed, and whether children are left."""
    killed = 0
    while True:
        try:
            pid, status = posix.waitpid(-1, posix.WNOHANG)
        except ChildProcessError:
            return killed, False
        if pid == 0:
            return killed, True
        code = posix.waitstatus_to_exitcode(status)
        if pid == host:
            _write(control, b"exit %d" % code if code >= 0 else b"signal %d" % -code)
        else:
            killed += code == -_signal.SIGKILL


def _kill_children() -> None:
    me = posix.getpid()
    for pid, row in look().items():
        if row[PARENT] == me and row[STATE] != ZOMBIE:
            try:
                posix.kill(pid, _signal.SIGKILL)
            except OSError:  # The process runs as another user.
                continue


def _signal_group(host: int, number: int) -> None:
    try:
        posix.killpg(host, number)
    except OSError:  # The group is empty, or another user's.
        return


def _write(control: int, word: bytes) -> None:
    try:
        posix.write(control, word)
    except OSError:  # The control plane is gone.
        return


def _read(control: int) -> bytes:
    try:
        return posix.read(control, WORD_BYTES_MAX)
    except OSError:
        return b""


def _libc(name: str, *arguments: "int | bytes") -> int:
    # Imported here, because a Python built without `_ctypes` imports this file, too.
    try:
        import _ctypes

        place = _ctypes.dlsym(_ctypes.dlopen(None, 0), name)  # type: ignore[arg-type]  # None is this program
        return int(_ctypes.call_function(place, arguments))
    except AttributeError:  # Those private functions are missing; `ctypes` takes 8 ms to import.
        import ctypes

        return int(getattr(ctypes.CDLL(None), name)(*arguments))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    # Skip the interpreter's finalization, which takes a millisecond.
    posix._exit(0)
