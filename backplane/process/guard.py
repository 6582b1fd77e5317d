"""The guard: a small program between the control plane and one host, so that nothing of the host can stay.

It is the subreaper of everything the host starts: whoever forks twice and leaves the session is handed
to it by the kernel. Words on one socket tell it what to do and tell the control plane what was seen;
the socket's end, or the control plane's, means: kill all. `process.py` starts it and reads the process
table through it. Only built-in modules are imported where they will do, as each is paid at every run.
"""

import _signal  # type: ignore[import-not-found]  # `signal` spends 5 ms on its enums
import marshal
import posix  # `os` costs 1.5 ms
import select
import sys
import time

SWEEP_S_MAX = 60.0
"""For killing all descendants. A tree takes some ms; longer only in uninterruptible sleep, and then somebody has
to be there when it ends: the control plane has a bound of its own and does not wait for this one."""

LOOK_S = 0.005
"""Between two looks at the process table, unless a death is reported before."""

WORD_BYTES_MAX = 64
"""The longest word on the socket."""

DEATHS_BYTES_MAX = 4096
"""One read of the reports of deaths, a byte each; what is left wakes us again."""

UMASK = 0o077
"""What a host makes is for its user alone."""

DEFAULT_PATH = b"/bin:/usr/bin"
"""Where a program is looked for when its environment has no PATH."""

CODE_UNSAID = 127
"""Exit code of a child that never became the program, as shells have it."""

F_SETFL = 4
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

RLIMIT_BYTES = 8
"""Of a soft and of a hard limit, in the kernel's structure."""

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""System calls, numbered alike on every machine but alpha."""
LANDLOCK_BENEATH, LANDLOCK_PORT = 1, 2
"""Kinds of rules."""

CONNECTIONS_WAITING_MAX = 64
"""To the proxy's door, not yet accepted; a browser opens six at once."""


PARENT, GROUP, SESSION, STATE, START = range(5)
"""Fields of a row of the process table; the start is in clock ticks since boot."""

ZOMBIE = ord("Z")
"""The state of one that has ended and is not reaped."""


def look() -> "dict[int, tuple[int, int, int, int, int]]":
    """Read the process table: pid → parent, group, session, state, start."""
    return {pid: seen for name in posix.listdir("/proc") if name.isdigit() and (seen := look_at(pid := int(name)))}


def look_at(pid: int) -> "tuple[int, int, int, int, int] | None":
    """Read one row of the process table; None when there is none."""
    try:
        fd = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return None
    try:
        row = posix.read(fd, 4096)
    except OSError:  # It ended between the two calls.
        return None
    finally:
        posix.close(fd)
    # The name in the second field may hold blanks and brackets of the host's choice.
    fields = row[row.rindex(b")") + 2 :].split()
    return int(fields[1]), int(fields[2]), int(fields[3]), fields[0][0], int(fields[19])


def main(role: str, socket_or_pipe: int, order: int) -> None:
    """Read the order, a file of marshalled (argv, env, cwd, fds, cage), and start it as a guard or in our own place.

    The cage, where there is one, says what holds the host: `held` (it starts once we hear "go"), `first` (we are
    the first process of a namespace of our own; the control plane's pidfd, and a pipe tied to our wrapper), `stdio`
    (its three descriptors under other numbers), `door` (where to send a listening socket, and its port),
    `limits` (numbers and values) and `landlock` (see `confine`).
    """
    argv, env, cwd, handed, cage = marshal.loads(posix.pread(order, posix.fstat(order).st_size, 0))
    posix.close(order)
    posix.set_inheritable(socket_or_pipe, False)
    if role == "guard":
        guard(socket_or_pipe, argv, env, cwd, handed, cage)
    else:
        become(argv, env, cwd, socket_or_pipe)


def guard(
    control: int,
    argv: "list[bytes]",
    env: "dict[bytes, bytes]",
    cwd: "bytes | None",
    handed: "list[int]",
    cage: "dict[str, object]",
) -> None:
    """Start the host and stay until all of it is gone.

    Says "pid PID START" or "spawn_error WHERE ERRNO", then "exit CODE" or "signal NUMBER", at the end "swept COUNT".
    Hears "go" before the start of one that is held, then "term" and "kill".
    """
    for number in (_signal.SIGINT, _signal.SIGHUP, _signal.SIGTERM, _signal.SIGQUIT):
        _signal.signal(number, _signal.SIG_IGN)
    # A host of the same user could take our memory or our socket else, and speak in our name.
    _libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    # A forked copy of the control plane may hold the socket open after its death.
    if "first" in cage:
        plane = _tie(*cage["first"])  # type: ignore[misc]  # two numbers
    else:
        plane = posix.pidfd_open(posix.getppid())
        if _libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            _say(control, b"spawn_error subreaper 0")
            return
    if "door" in cage:
        _send_door(*cage["door"])  # type: ignore[misc]  # two numbers
    stdio = cage.get("stdio", ())
    for fd in stdio:  # type: ignore[attr-defined]  # a tuple
        posix.set_inheritable(fd, False)
    if cage.get("held") and not _released(control, plane):
        _say(control, b"swept 0")
        return
    host, fault = _start(argv, env, cwd, cage)
    _let_go([*handed, *stdio])  # type: ignore[misc]
    if fault:
        _say(control, b"spawn_error " + fault)
        return
    try:
        row = look_at(host)
        _say(control, b"pid %d %d" % (host, row[START] if row else 0))
        _serve(control, plane, host)
    finally:
        _say(control, b"swept %d" % _sweep(control, host))


def become(
    argv: "list[bytes]",
    env: "dict[bytes, bytes]",
    cwd: "bytes | None",
    tell: int,
    parent: int = 0,
    cage: "dict[str, object] | None" = None,
) -> None:
    """Turn this process into the program, in a session of its own; on failure write "WHERE ERRNO" to `tell` and end.

    Args:
        parent: whose death shall be the program's, 0 for nobody's.
    """
    where = b"exec"
    cage = cage or {}
    try:
        # A hostile host may kill its guard; it shall not outlive that.
        if parent and (_libc("prctl", PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0), posix.getppid())[1] != parent:
            posix._exit(CODE_UNSAID)
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
        if "landlock" in cage:
            where = b"landlock"
            confine(*cage["landlock"])  # type: ignore[misc]  # its arguments
        where = b"exec"
        _reset_signals()
        _execute(argv, env)
    except (OSError, ValueError) as fault:  # ValueError: a zero byte in an argument.
        posix.write(tell, b"%s %d" % (where, getattr(fault, "errno", None) or 22))
    finally:
        posix._exit(CODE_UNSAID)


def confine(ruleset: bytes, rights: int, file_rights: int, paths: "list[bytes]", ports: "list[bytes]") -> None:
    """Give up, for this process and all it starts, what Landlock is told to guard but for these paths and ports.

    Args:
        ruleset: the kernel's structure of what is guarded.
        rights: kept below each path; `file_rights` of them where the path is no folder.
        ports: the kernel's structures, one a port.

    Raises:
        OSError: the kernel refused; a path that is not there is no fault, there is nothing to be kept.
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


def _tie(plane: int, life: int) -> int:
    """Tie us, who get all orphans of our namespace, to our wrapper, and that to the control plane.

    Then the kernel ends all of it should we be held up. Bubblewrap's own way, `--die-with-parent`, begins too early:
    killed by it right after its fork it leaves its child, who was to become us, waiting for ever.
    """
    for fd in (plane, life):
        posix.set_inheritable(fd, False)
    _libc("prctl", PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    _libc("fcntl", life, F_SETFL, posix.O_ASYNC)
    return plane


def _released(control: int, plane: int) -> bool:
    """Wait for the word to start; False when there will be nothing to start."""
    events = select.poll()
    for fd in (control, plane):
        if fd >= 0:
            events.register(fd, select.POLLIN)
    return all(fd == control for fd, _ in events.poll()) and _heard(control) == b"go"


def _send_door(line: int, port: int) -> None:
    """Listen on a port of our own network, and give the socket to the control plane, which lives in another one."""
    import _socket

    door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    door.bind(("127.0.0.1", port))
    door.listen(CONNECTIONS_WAITING_MAX)
    to = _socket.socket(fileno=line)
    to.sendmsg((b"door",), ((_socket.SOL_SOCKET, _socket.SCM_RIGHTS, door.fileno().to_bytes(4, sys.byteorder)),))
    to.close()
    door.close()


def _start(
    argv: "list[bytes]", env: "dict[bytes, bytes]", cwd: "bytes | None", cage: "dict[str, object]"
) -> "tuple[int, bytes]":
    told, tell = posix.pipe()
    me = posix.getpid()
    host = posix.fork()
    if host == 0:
        become(argv, env, cwd, tell, me, cage)
    posix.close(tell)
    fault = posix.read(told, WORD_BYTES_MAX)  # Empty when exec closed the other end.
    posix.close(told)
    if fault:
        posix.waitpid(host, 0)  # It ends with its word. Our own parent may not be one that waits for orphans.
    return host, fault


def _reset_signals() -> None:
    # What the control plane ignores, its children shall hear.
    for number in _signal.valid_signals():
        if number not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _execute(argv: "list[bytes]", env: "dict[bytes, bytes]") -> None:
    if b"/" in argv[0]:
        posix.execve(argv[0], argv, env)
    failure: OSError = FileNotFoundError(2, "not in PATH")
    for folder in env.get(b"PATH", DEFAULT_PATH).split(b":"):
        try:
            posix.execve((folder or b".") + b"/" + argv[0], argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as fault:
            failure = fault  # A file of this name that cannot be run says more than the folders without one.
    raise failure


def _let_go(handed: "list[int]") -> None:
    # What is the host's: while a copy is here, its end would not be seen.
    nothing = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    for fd in (0, 1, 2):
        posix.dup2(nothing, fd)
    for fd in handed:
        posix.close(fd)


def _serve(control: int, plane: int, host: int) -> None:
    """Report the host's end and hand on "term", until told to kill or nobody is left to tell."""
    ended, orphaned = posix.pidfd_open(host), _deaths()
    events = select.poll()
    for fd in (control, plane, ended, orphaned):
        if fd >= 0:
            events.register(fd, select.POLLIN)
    while True:
        for fd, _ in events.poll():
            if fd == ended:
                events.unregister(ended)
                # Left a zombie until the sweep, so that neither its pid nor its group can become a stranger's.
                seen = posix.waitid(posix.P_PID, host, posix.WEXITED | posix.WNOWAIT)
                assert seen is not None  # Only with WNOHANG is there an answer without an end.
                _say(control, b"%s %d" % (b"exit" if seen.si_code == posix.CLD_EXITED else b"signal", seen.si_status))
            elif fd == orphaned:
                posix.read(orphaned, DEATHS_BYTES_MAX)
                _reap_orphans(host)
            elif fd == plane or _heard(control) != b"term":
                return
            else:
                _signal_group(host, _signal.SIGTERM)
                _signal_group(host, _signal.SIGCONT)


def _deaths() -> int:
    """A descriptor that can be read once a child of ours has ended.

    Reaping in the handler itself would be interrupted by the next death, which reaps who was just looked at.
    """
    told, tell = posix.pipe2(posix.O_NONBLOCK | posix.O_CLOEXEC)
    _signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    return told


def _reap_orphans(host: int) -> None:
    flags = posix.WEXITED | posix.WNOHANG | posix.WNOWAIT
    while (seen := posix.waitid(posix.P_ALL, 0, flags)) and seen.si_pid != host:
        posix.waitpid(seen.si_pid, 0)


def _sweep(control: int, host: int) -> int:
    """Kill until there is no child left; returns how many descendants of the host that took.

    Each one whose parent dies becomes our child, so "no child" proves "no descendant", however fast they
    fork. A child that we have not reaped keeps its pid, so no stranger can be hit.
    """
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGCHLD,))
    end_s = time.monotonic() + SWEEP_S_MAX
    _signal_group(host, _signal.SIGKILL)
    swept, left = _reap(control, host)
    if left:  # The group needs a moment to die; most often it is all there is.
        _signal.sigtimedwait((_signal.SIGCHLD,), LOOK_S)
    while left and time.monotonic() < end_s:
        killed, left = _reap(control, host)
        swept += killed
        if left:
            _kill_children()
            _signal.sigtimedwait((_signal.SIGCHLD,), LOOK_S)
    return swept


def _reap(control: int, host: int) -> "tuple[int, bool]":
    """Reap who has ended; returns how many but the host were killed, and whether children are left."""
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
            _say(control, b"exit %d" % code if code >= 0 else b"signal %d" % -code)
        else:
            killed += code == -_signal.SIGKILL


def _kill_children() -> None:
    me = posix.getpid()
    for pid, row in look().items():
        if row[PARENT] == me and row[STATE] != ZOMBIE:
            try:
                posix.kill(pid, _signal.SIGKILL)
            except OSError:  # One that took another user's rights is beyond us.
                continue


def _signal_group(host: int, number: int) -> None:
    try:
        posix.killpg(host, number)
    except OSError:  # Nobody there, or nobody of our user.
        return


def _say(control: int, word: bytes) -> None:
    try:
        posix.write(control, word)
    except OSError:  # Nobody is left to hear it.
        return


def _heard(control: int) -> bytes:
    try:
        return posix.read(control, WORD_BYTES_MAX)
    except OSError:
        return b""


def _libc(name: str, *arguments: "int | bytes") -> int:
    # Here, as a Python built without it shall be able to import this file.
    try:
        import _ctypes

        place = _ctypes.dlsym(_ctypes.dlopen(None, 0), name)  # type: ignore[arg-type]  # None is this program
        return int(_ctypes.call_function(place, arguments))
    except AttributeError:  # The short way is nobody's promise; the long one costs 8 ms.
        import ctypes

        return int(getattr(ctypes.CDLL(None), name)(*arguments))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    # Without the interpreter's own farewell, which costs a millisecond and guards nothing.
    posix._exit(0)
