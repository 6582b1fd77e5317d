"""Git itself, for what only it knows: differences, ignore rules, merges.

Git is only ever run on a repository made for that one call, outside every workspace, with no
work tree of anybody else's in sight: it sees blobs and trees that we wrote. So nothing in an
untrusted tree (hooks, attributes, filters, nested repositories) can start a program.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from backplane.errors import BackendError, WorkspaceError
from backplane.process.tool import Finished, run_tool, search_path
from backplane.workspace.copying import copy_whole
from backplane.workspace.pack import PACK_NAME, Pack
from backplane.workspace.tree import printable, remove_tree, unguessable

GIT_S_MAX: Final = 60.0
"""Bound of one git call; a diff of 20,000 changed files takes some seconds, one of 1.5 GiB in 25 files three."""

RULES_S_MAX: Final = 20.0
"""Bound of a question by somebody else's ignore rules. A million files take some seconds; what git's matching takes
doubles with each `**/` of a rule."""

PATCH_BYTES_MAX: Final = 4 << 30
"""Bound of a patch file. The workspace's quota is met long before."""

RENAMES_MAX: Final = 1000
"""Added times deleted files, root of, that git compares by content; git's own default. Exact renames have no limit."""

RULES_NAME: Final = ".gitignore"
RULES_BYTES_MAX: Final = 1 << 20
"""Longest `.gitignore` that is obeyed; git's own documentation shows none of over a few KiB."""

RULES_SUM_BYTES_MAX: Final = 16 << 20
"""All `.gitignore`s of a workspace together: ten thousand of over a KiB each. They are held in memory and copied for
git."""

RULES_PATH_BYTES_MAX: Final = 3000
"""Paths longer than this are not asked about: with the scratch folder before them git would refuse them."""

_CONFIG: Final = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = true
\tlogallrefupdates = false
\tfsmonitor = false
\tuntrackedCache = false
\thooksPath = /dev/null
\tattributesFile = /dev/null
\texcludesFile = /dev/null
\tautocrlf = false
\tsafecrlf = false
\tquotePath = true
\tpreloadIndex = false
[diff]
\talgorithm = myers
\trenames = true
[merge]
\tconflictStyle = merge
[protocol]
\tallow = never
"""

_CONFIG_SHA256: Final = _CONFIG.replace("version = 0", "version = 1") + "[extensions]\n\tobjectformat = sha256\n"

# Highest in precedence: whatever a `.gitattributes` says is unsaid.
_ATTRIBUTES: Final = "* -text !eol !crlf -ident !filter -working-tree-encoding !diff !merge !whitespace\n"


class DiffRow(msgspec.Struct, frozen=True):
    """One line of `git diff-tree --raw` with its `--numstat`."""

    letter: str
    old_mode: int
    new_mode: int
    same_content: bool
    path: bytes
    old_path: bytes | None
    binary: bool


class Scratch:
    """A repository for one use, which is made when it is first needed.

    Args:
        place: the folder to make for it.
        code: the error code of a failure here.
        stopped: asked while git is at work; true kills it.
    """

    def __init__(self, place: Path, code: str, stopped: Callable[[], bool]) -> None:
        self.place, self.code, self.stopped = place, code, stopped
        self.env = _environment(place)
        """Git's whole environment."""

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the repository. The first use makes it, as many runs change no file. Raises OSError."""
        self.place.mkdir(mode=0o700)
        for part in ("objects/pack", "refs/heads", "info"):
            (self.place / "git" / part).mkdir(parents=True)
        (self.place / "git/HEAD").write_text("ref: refs/heads/none\n")
        (self.place / "git/config").write_text(_CONFIG)
        (self.place / "git/info/attributes").write_text(_ATTRIBUTES)
        return self.place

    @property
    def git_dir(self) -> Path:
        return self.folder / "git"

    def read_as(self, *, sha256: bool) -> None:
        """Take names of objects for hashes of this kind from now on."""
        (self.git_dir / "config").write_text(_CONFIG_SHA256 if sha256 else _CONFIG)

    def borrow(self, objects: Path) -> None:
        """Read another repository's objects as well."""
        (self.git_dir / "objects/info").mkdir()
        (self.git_dir / "objects/info/alternates").write_bytes(os.fsencode(objects) + b"\n")

    def pack(self) -> Pack:
        return Pack(self.git_dir / "objects/pack" / f"{PACK_NAME}.pack")

    def finish(self, pack: Pack) -> None:
        """End a pack made by `pack`, so that git finds what is in it."""
        pack.path.with_suffix(".idx").write_bytes(pack.finish())

    def git(
        self,
        *words: str,
        settings: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        stdout_path: Path | None = None,
        codes: Iterable[int] = (0,),
        cwd: Path | None = None,
        timeout_s: float = GIT_S_MAX,
        slow: str = "leave what is large or many out with --exclude",
    ) -> Finished:
        """Run git on this repository and nothing else of the machine's configuration.

        Args:
            slow: what helps where it takes longer than `timeout_s`.

        Raises:
            WorkspaceError: the scratch's code; git is missing, too slow, was stopped, or ends with another exit code.
        """
        folder = self.folder
        try:
            done = run_tool(
                [shutil.which("git", path=self.env["PATH"]) or "git", *words],
                env=self.env | dict(settings or {}),
                cwd=str(cwd or folder),
                stdin=stdin,
                timeout_s=timeout_s,
                output_bytes_max=PATCH_BYTES_MAX,
                stdout_path=str(stdout_path) if stdout_path else None,
                stopped=self.stopped,
            )
        except BackendError as error:
            hint = {"sidecar_spawn_failed": "install git", "backend_timeout": slow}.get(error.code, error.hint)
            fact = f"git {words[0]}: {error.message}"
            raise WorkspaceError(self.code, fact, hint=hint, evidence=error.evidence) from error
        if done.code not in codes:
            said = done.stderr.decode("utf-8", "backslashreplace")
            raise WorkspaceError(self.code, f"git {words[0]} ended with exit code {done.code}", evidence=said)
        return done


@contextmanager
def scratch(folder: Path, code: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[Scratch]:
    """Provide an empty repository below `folder` for the block.

    Args:
        stopped: asked while git is at work; true kills it.
    """
    made = Scratch(folder / f"git-{unguessable()}", code, stopped)
    try:
        yield made
    finally:
        remove_tree(made.place)


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": search_path(os.environ),
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "LC_ALL": "C",
        "GIT_DIR": str(folder / "git"),
        "GIT_CEILING_DIRECTORIES": str(folder),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_PAGER": "cat",
    }


def write_patch(at: Scratch, before: bytes, after: bytes, patch: Path) -> list[DiffRow]:
    """Write the difference of two trees as a git patch; return its rows."""
    renames = f"-l{RENAMES_MAX}"
    trees = (before.hex(), after.hex(), "--")
    raw = at.git("diff-tree", "-r", "-z", "-M", renames, "--raw", "--numstat", "--no-abbrev", *trees).stdout
    form = ("-p", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")
    names = ("--src-prefix=a/", "--dst-prefix=b/")
    at.git("diff-tree", "-r", "-M", renames, *form, *names, *trees, stdout_path=patch)
    return _rows(raw)


def put(at: Scratch, patch: Path, folder: Path) -> None:
    """Put a patch into a folder that is a copy of ours; git refuses one that leaves it or goes through a link.

    Raises:
        WorkspaceError: the scratch's code.
    """
    at.git("apply", "--binary", "--whitespace=nowarn", str(patch), cwd=folder)


def _rows(raw: bytes) -> list[DiffRow]:
    """Read `--raw --numstat -z`: first all raw lines, then all counts, in the same order."""
    fields = _fields(raw)
    heads: list[tuple[str, int, int, bool, bytes, bytes | None]] = []
    binary: list[bool] = []
    for field in fields:
        if field.startswith(b":") and not binary:
            old_mode, new_mode, old, new, letter = field[1:].decode().split(" ")
            first = next(fields)
            moved = letter[0] in "RC"
            path, old_path = (next(fields), first) if moved else (first, None)
            heads.append((letter[0], int(old_mode, 8), int(new_mode, 8), old == new, path, old_path))
        elif field:
            added, _, path = field.split(b"\t", 2)
            binary.append(added == b"-")
            if not path:
                next(fields), next(fields)
    return [DiffRow(*head, is_binary) for head, is_binary in zip(heads, binary, strict=True)]


def _fields(raw: bytes) -> Iterator[bytes]:
    """Split at each NUL, one at a time: all of them at once are as much again as the rows."""
    place = 0
    while (end := raw.find(b"\0", place)) >= 0:
        yield raw[place:end]
        place = end + 1


def without_holes(rules: bytes) -> bytes:
    """The same rules without what git does not see of them: a line ends at its first NUL, so a hole says nothing."""
    return re.sub(rb"\0[^\n]*", b"", rules) if b"\0" in rules else rules


def ignored(at: Scratch, paths: Sequence[str], rules: Mapping[str, bytes], excluded: bytes) -> set[str]:
    """Ask git which of these files its ignore rules leave out.

    Git gets a tree that holds nothing but copies of the rules, so it cannot meet anything else.

    Args:
        rules: content of each `.gitignore`, by the folder it is in (with a slash at the end).
        excluded: content of `info/exclude`.
    """
    if not paths or not (rules or excluded):
        return set()
    shadow = at.folder / "rules"
    shadow.mkdir()
    for folder, text in rules.items():
        if len(os.fsencode(folder)) <= RULES_PATH_BYTES_MAX:
            for end in (place for place, letter in enumerate(folder) if letter == "/"):
                (shadow / folder[:end]).mkdir(exist_ok=True)
            (shadow / folder / RULES_NAME).write_bytes(text)
    (at.git_dir / "info/exclude").write_bytes(excluded)
    # "./" before each, because ":" at the start would be git's own syntax.
    asked = b"".join(b"./%s\0" % raw for raw in map(os.fsencode, paths) if len(raw) <= RULES_PATH_BYTES_MAX)
    settings = {"GIT_WORK_TREE": str(shadow)}
    words = ("check-ignore", "--no-index", "--stdin", "-z")
    # Exit code 1 says that none is ignored.
    answer = at.git(
        *words, settings=settings, stdin=asked, codes=(0, 1), cwd=shadow, timeout_s=RULES_S_MAX, slow=_simplify(rules)
    ).stdout
    remove_tree(shadow)
    return {os.fsdecode(path[2:]) for path in answer.split(b"\0") if path}


def _simplify(rules: Mapping[str, bytes]) -> str:
    """What helps against rules that take too long, with the name of those that may be meant."""
    name = printable(max(rules, key=lambda folder: rules[folder].count(b"**"), default=".git/info/exclude"))
    name = f"{name}.gitignore" if rules else name
    aside = f", or leave it out with --exclude '{name}'" if rules else ""
    return f"a rule with many '**/' takes git for ever: simplify '{name}'{aside}"


def tracked(at: Scratch, git_dir: Path) -> set[str] | None:
    """List the paths of a repository's index; empty where it has none, None where there is one that git cannot read."""
    index = git_dir / "index"
    if os.path.isdir(git_dir) and not os.path.lexists(index):
        return set()
    if not os.path.isfile(index):
        return None
    ours = at.git_dir  # Made here: a full disk is no fault of that repository.
    try:
        copy_shared(git_dir, ours)
        # Which hash it is of is not said in it.
        for sha256 in (False, True):
            at.read_as(sha256=sha256)
            settings = {"GIT_INDEX_FILE": str(index)}
            # Also a signal: git 2.39 crashes on an index of version 4 with the other hash.
            done = at.git("ls-files", "-z", settings=settings, codes=range(-64, 256), timeout_s=RULES_S_MAX)
            if done.code == 0:
                return {os.fsdecode(path) for path in done.stdout.split(b"\0") if path}
    except OSError:
        return None
    finally:
        at.read_as(sha256=False)
    return None


def copy_shared(git_dir: Path, to: Path) -> None:
    """Copy the files that a split index may be completed by: git notes at them when it used them. Raises OSError."""
    for path in git_dir.glob("sharedindex.*"):
        with (git_dir / "index").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as index:
            named = index.find(bytes.fromhex(path.suffix[1:])) >= 0
        if named and path.is_file() and not (to / path.name).exists():
            copy_whole(path, to / path.name)


def user_rules(environ: Mapping[str, str]) -> bytes:
    """Read the ignore rules that the user's own and the system's git configuration name; empty without any."""
    names = ("HOME", "XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
    env = {name: environ[name] for name in names if name in environ}
    # No repository, so none's configuration is read.
    env |= {"PATH": search_path(environ), "GIT_DIR": os.devnull, "LC_ALL": "C"}
    git = shutil.which("git", path=env["PATH"]) or "git"
    words = ("config", "--includes", "--type=path", "-z", "--get", "core.excludesFile")
    try:
        named = run_tool([git, *words], env=env, cwd="/", timeout_s=RULES_S_MAX).stdout.rstrip(b"\0")
    except BackendError:
        return b""  # Without git there is nothing that the user set for it.
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "/", ".config")
    place = Path(os.fsdecode(named) or os.path.join(home, "git/ignore"))
    try:
        with place.open("rb") as file:
            rules = file.read(RULES_BYTES_MAX + 1) if place.is_file() else b""
    except (OSError, ValueError):
        return b""
    return without_holes(rules) if len(rules) <= RULES_BYTES_MAX else b""


def merge(at: Scratch, ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """Merge two changes of one file; None when they touch the same lines or are not text."""
    names = ("ours", "base", "theirs")
    for name, data in zip(names, (ours, base, theirs), strict=True):
        (at.folder / name).write_bytes(data)
    done = at.git("merge-file", "-p", "--quiet", *names, codes=range(256))
    return done.stdout if done.code == 0 else None
