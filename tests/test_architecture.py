"""The map of the house as a test: which room may import which, and what must be absent where.

A room is a module or package directly under `backplane/`; `hosts` is one room. To add a room, add its row to `ROOMS`.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.stats import doubles, sources

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "backplane"
HOSTS = ROOT / "hosts"

# The tables -----------------------------------------------------------------------------------------------------------

SHAPES = "errors contract"
ROOMS = {
    # shapes, decisions and translation: no I/O
    "errors": "",
    "contract": "errors",
    "contract.light": "",
    "dialects.ir": "contract",
    "redact": SHAPES,
    "protocol": f"{SHAPES} redact",
    "policy": SHAPES,
    "dialects": f"{SHAPES} dialects.ir",
    # doors to the world
    "resources": "errors",
    "process.guard": "",
    "process.table": "",
    "process": f"{SHAPES} process.guard process.table protocol redact",
    "config": f"{SHAPES} resources",
    "workspace": f"{SHAPES} policy process",
    "sandbox.credentials": SHAPES,
    "sandbox": f"{SHAPES} config policy process process.guard resources sandbox.credentials workspace",
    "receipts.folded": SHAPES,
    "receipts.calls": f"{SHAPES} policy",
    "receipts.outcomes": SHAPES,
    "receipts.state": f"{SHAPES} policy receipts.calls receipts.claims receipts.folded redact",
    "receipts.enforcement": f"{SHAPES} policy receipts.state",
    "receipts.build": f"{SHAPES} receipts.enforcement receipts.outcomes receipts.state",
    "receipts.claimed_texts": f"{SHAPES} policy",
    "receipts.claims": f"{SHAPES} policy receipts.claimed_texts redact",
    "receipts": f"{SHAPES} policy process receipts.folded",
    "view": f"{SHAPES} gateway.record process.table receipts.folded routing",
    "upstream.clients": "errors",
    "upstream.endpoint": "errors upstream.clients",
    "upstream.presets": "errors upstream.endpoint",
    "upstream.cost": f"{SHAPES} dialects.ir",
    "upstream.measures": "",
    "upstream.prices": "upstream.cost",
    "upstream.meter": f"{SHAPES} dialects dialects.ir upstream.cost",
    "upstream": f"{SHAPES} dialects dialects.ir upstream.clients upstream.cost upstream.endpoint upstream.presets",
    "gateway.record": SHAPES,
    "gateway.agents": f"{SHAPES} config dialects dialects.ir gateway gateway.record runtime upstream.cost",
    "gateway": (
        f"{SHAPES} config dialects dialects.ir gateway.record process redact sandbox upstream upstream.clients "
        "upstream.cost upstream.measures upstream.meter upstream.endpoint upstream.presets upstream.prices"
    ),
    "schemas": f"{SHAPES} agents.rows config dialects.ir policy protocol resources sandbox.credentials "
    "upstream.endpoint upstream.presets",
    "testing": f"{SHAPES} upstream.endpoint upstream.presets",
    # the near side of the line: a run, from its order to its stored receipt
    "agents.rows": "errors",
    "routing": f"{SHAPES} policy upstream.cost upstream.measures",
    "routing.driver": (
        f"{SHAPES} agents.rows config policy receipts routing runtime upstream upstream.cost "
        "upstream.endpoint upstream.presets upstream.prices view"
    ),
    "routing.compare": f"{SHAPES} config policy receipts routing routing.driver runtime view workspace",
    "runtime": (
        f"{SHAPES} agents.rows config gateway policy process protocol receipts receipts.build receipts.calls "
        "receipts.claimed_texts receipts.claims receipts.enforcement receipts.folded receipts.outcomes receipts.state "
        "redact resources routing sandbox sandbox.credentials "
        "telemetry upstream.cost upstream.endpoint upstream.presets workspace"
    ),
    "telemetry": f"{SHAPES} receipts.folded",
    "api": f"{SHAPES} config providers routing routing.driver runtime",
    "providers": f"{SHAPES} agents config dialects dialects.ir policy process protocol receipts redact routing runtime "
    "upstream",
    # the far side: the kit of a host, and what hosts drive
    "host": f"{SHAPES} policy process protocol",
    "tools": f"{SHAPES} dialects dialects.ir policy process protocol upstream upstream.clients",
    "agents": (
        f"{SHAPES} agents.rows config dialects dialects.ir host policy process protocol tools "
        "upstream upstream.cost upstream.endpoint upstream.presets upstream.prices"
    ),
    "hosts": f"{SHAPES} agents agents.rows config contract.light host process",
    # the front doors
    "serve": (
        f"{SHAPES} api config host policy process protocol providers receipts receipts.outcomes routing.driver runtime "
        "schemas workspace"
    ),
    "view.load": f"{SHAPES} process process.table receipts routing upstream.prices view",
    "web": f"{SHAPES} gateway gateway.record receipts runtime view view.load workspace",
    "scale": f"{SHAPES} config process receipts routing.driver runtime view workspace",
    "scale.serve": f"{SHAPES} host receipts receipts.outcomes runtime scale serve",
    "scale.commands": (f"{SHAPES} cli config receipts receipts.outcomes runtime scale telemetry view workspace"),
    "conform": f"{SHAPES} agents.rows api config policy process protocol receipts resources runtime schemas testing",
    "__init__": f"{SHAPES} api config runtime scale",
    "cli": (
        f"{SHAPES} __init__ config conform contract.light dialects gateway gateway.record policy process protocol "
        "providers receipts receipts.claims receipts.outcomes redact resources routing routing.compare "
        "routing.driver runtime sandbox sandbox.credentials scale scale.serve schemas serve telemetry tools "
        "upstream upstream.cost upstream.endpoint upstream.presets view view.load web workspace"
    ),
    "cli.gateway": "errors cli config gateway gateway.agents gateway.record process runtime",
    "__main__": "cli",
}
"""Room → the rooms that it may import. A module with a row of its own is a smaller room: pure, or a table."""

GROUND = {"errors", "contract"}
PURE = {
    *("dialects.ir", "redact", "protocol", "policy", "dialects", "receipts.folded", "receipts.build", "receipts.calls"),
    *("receipts.claims", "receipts.claimed_texts", "receipts.enforcement", "receipts.outcomes", "receipts.state"),
    *("gateway.record", "process.table", "routing", "upstream.cost", "upstream.measures", "view"),
}
PURE_NEVER = {
    "os",
    "socket",
    "subprocess",
    "time",
    "random",
    "asyncio",
    "anyio",
    "trio",
    "threading",
    "multiprocessing",
    "select",
    "signal",
    "secrets",
    "tempfile",
    "shutil",
    "pathlib",
    "io",
    "http",
    "urllib.request",
    "ssl",
    "sqlite3",
    "logging",
    "concurrent",
}
PURE_NEVER_CALLS = {"open", "input", "print", "now", "utcnow", "today", "uuid1", "uuid4", "getnode"}

THIRD_PARTY = {
    "msgspec": set(ROOMS) - {"process.guard", "__main__"},
    "anyio": set(ROOMS) - PURE - GROUND - {"process.guard", "__main__", "schemas", "resources"},
    "typing_extensions": {"runtime"},  # for type checkers alone, which bring it
    "jsonschema": {"agents", "schemas", "cli", "tools"},
    "ahocorasick_rs": {"redact"},
    "referencing": {"agents"},  # jsonschema's own errors of references
    "httpx": {"upstream", "tools", "agents", "gateway"},
    "h11": {"testing", "sandbox", "gateway", "upstream"},  # comes with httpx
    "websockets": {"agents"},  # an extra: only where Kimi is driven
    "opentelemetry": {"telemetry"},  # an extra: only where a collector is named
    "dbos": {"scale"},  # an extra: only where orders go to a queue
    "sqlalchemy": {"scale"},  # comes with it
    "fsspec": {"scale"},  # an extra: only where the contents of a queue are at a URL
    "prompt_toolkit": {"cli"},  # an extra: only where a person chats
    "starlette": {"web"},  # an extra: only where a page is served
    "uvicorn": {"web"},
    "cryptography": {"receipts", "cli"},  # an extra: only where something is signed
}
"""Package → the rooms that may import it. One that is not in this table is not a dependency of ours."""

STARTS_PROCESSES = {"process", "process.guard"}
STARTING_MODULES = {"subprocess", "multiprocessing", "pty"}
STARTING_CALLS = {
    "fork",
    "forkpty",
    "posix_spawn",
    "posix_spawnp",
    "system",
    "popen",
    "execv",
    "execve",
    "execvp",
    "execvpe",
    "execl",
    "execle",
    "execlp",
    "execlpe",
    "spawnv",
    "spawnve",
    "spawnl",
    "spawnle",
    "create_subprocess_exec",
    "create_subprocess_shell",
    "open_process",
    "run_process",
}

PRINTS = {"cli", "cli.gateway", "schemas", "host", "scale.commands"}
"""The kit writes a host's own bug to its stderr, as a traceback would be; its stdout belongs to the protocol."""
VENDORS = ("claude", "codex", "gemini", "copilot", "kimi", "openai", "anthropic")
NAMES_VENDORS = {
    "agents",
    "agents.rows",
    "cli.gateway",
    "config",
    "dialects",
    "gateway",
    "hosts",
    "sandbox.credentials",
    "testing",
    "upstream",
    "upstream.cost",
    "upstream.meter",
    "upstream.endpoint",
    "upstream.presets",
}

LATE = {
    "agents.rows.endpoints": "`urllib.parse` takes 5 ms of each host's hello",
    "api.create_session_for_task": "sessions, for programs that hold conversations",
    "errors.unforeseen": "traceback, for a fault of ours",
    "agents.rows.rows_of": "tomllib: a control plane sends a host the whole row",
    "agents.order.shape_of": "jsonschema, for orders with a shape",
    "host.speak": "the event loop, behind the hello",
    "providers.tools._schema": "jsonschema, for the first call of a definition's handler",
    "scale.commands.worker._gauges": "the SDK, an extra",
    "scale.place.open": "the engine, which takes a second",
    "scale.content.__init__": "fsspec, an extra",
    "scale.commands.worker._work": "the engine, which takes a second",
    "schemas.validate.validator_of": "jsonschema, where the typed reader does not do",
    "view.load.moment_of": "the prices, for a run whose model is unknown to its service",
    "telemetry.sender._work": "the SDK, in a thread while the run is at work",
    "tools.specs.fault_in": "jsonschema, for the first call of a tool",
}
"""Functions with an import of their own: what it loads takes longer than a start, and few runs want it."""
LATE_ROOMS = {
    *(
        "__init__",
        "__main__",
        "cli",
        "cli.gateway",
        "config",
        "contract",
        "dialects",
        "process",
        "process.guard",
        "receipts",
    ),
    *("runtime", "sandbox"),
}
"""Rooms in which functions may import, or still do."""

FLOATS_OF_THE_CONTRACT = {
    "SessionConfig.max_budget_usd",
    "SessionConfig.temperature",
    "RuntimeConfig.max_budget_usd",
    "Usage.estimated_cost_usd",
}
"""The floats that `abp/v0.1` has on the wire. We add none to anything that is hashed."""
SETTINGS = {"process", "config", "host", "runtime", "sandbox", "upstream", "conform", "upstream.endpoint"}
"""Rooms whose structs also hold settings that are never hashed; a time (`…_s`) or an amount of money (`…_usd`) may be a
float there."""

MUTABLE_MAKERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}


# Reading the house ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Module:
    """One source file, parsed."""

    path: Path
    name: str
    room: str
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted([*PACKAGE.rglob("*.py"), *HOSTS.rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        room = room_of(name) or "no room"
        found.append(Module(path, name, room, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return tuple(found)


@cache
def nodes(module: Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(module.tree))


@cache
def imports(module: Module) -> tuple[tuple[ast.AST, str], ...]:
    """Return every imported dotted name, those inside functions too; `from a import b` gives `a.b`."""
    return tuple(_imports(module))


def _imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "Deferred"):
            names = [getattr(argument, "value", None) for argument in node.args[:1]]
            yield from ((node, name.partition(":")[0]) for name in names if isinstance(name, str))


def called(node: ast.Call) -> str:
    """Return the last name of what is called: `open` for `open(…)`, `now` for `datetime.now(…)`."""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def room_of(dotted: str) -> str | None:
    """Return the room of an imported name of ours, None for a name that is not ours."""
    parts = dotted.split(".")
    if parts[0] == "hosts":
        return "hosts"
    if parts[0] != "backplane":
        return None
    inside = parts[1] if len(parts) > 1 else "__init__"
    if ".".join(parts[1:3]) in ROOMS:
        return ".".join(parts[1:3])
    is_room = (PACKAGE / inside).is_dir() or (PACKAGE / f"{inside}.py").exists()
    # Any other name of `backplane` is a public name of the front door.
    return inside if is_room or inside in ROOMS else "__init__"


def rooms_used(module: Module) -> Iterator[tuple[ast.AST, str]]:
    for node, dotted in imports(module):
        room = room_of(dotted)
        if room is not None and room != module.room:
            yield node, room


def allowed(room: str) -> set[str]:
    return set(ROOMS.get(room, "").split())


def check_none(title: str, found: list[str]) -> None:
    if found:
        pytest.fail("\n  ".join([title, *dict.fromkeys(found)]), pytrace=False)


# The rules ------------------------------------------------------------------------------------------------------------


def test_every_module_is_on_the_map() -> None:
    unknown = [f"{module.path.relative_to(ROOT)}" for module in modules() if module.room not in ROOMS]
    check_none("not on the map; add a row to ROOMS in tests/test_architecture.py:", unknown)


def test_the_map_names_only_its_own_rooms() -> None:
    wrong = [f"{room}: {name}" for room in ROOMS for name in sorted(allowed(room) - set(ROOMS))]
    check_none("ROOMS in tests/test_architecture.py allows rooms that have no row:", wrong)


def test_the_map_of_the_page_is_this_one() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## 4. The map")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (yes|partly|no) \| .* \| (.*) \|$", page, re.M)
    rooms = {name for name in (row.partition(".")[0] for row in ROOMS) if not name.startswith("__")}
    assert {name for name, _, _ in rows} == rooms
    for name, pure, others in rows:
        parts = [row for row in ROOMS if row.partition(".")[0] == name]
        used = {room.partition(".")[0] for row in parts for room in allowed(row)} & rooms - GROUND - {name}
        words = set(re.findall(r"\w+", others)) & rooms
        assert used == (rooms - words - GROUND - {name} if others.startswith("everything but") else words), name
        assert (pure != "no") == (name in PURE | GROUND), name


def test_the_page_names_tests_that_are_here() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert [name for name in re.findall(r"`(test_\w+)`", page) if name not in globals()] == []


def test_rooms_import_only_what_the_map_allows() -> None:
    wrong = [
        f"{module.at(node)}: {module.room} imports {room}"
        for module in modules()
        for node, room in rooms_used(module)
        if module.room in ROOMS and room not in allowed(module.room)
    ]
    check_none("not allowed by ROOMS in tests/test_architecture.py:", wrong)


def test_the_map_and_the_house_are_free_of_cycles() -> None:
    used: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in modules():
        used.setdefault(module.room, set()).update(room for _, room in rooms_used(module))
    for graph in (used, {room: allowed(room) for room in ROOMS}):
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            pytest.fail(f"a cycle of rooms: {' ← '.join(error.args[1])}", pytrace=False)


def test_errors_and_contract_import_nothing_of_ours() -> None:
    assert allowed("errors") == set()
    assert allowed("contract") == {"errors"}


def test_pure_rooms_stand_only_on_pure_rooms() -> None:
    wrong = [f"{room}: {name}" for room in sorted(PURE) for name in sorted(allowed(room) - PURE - GROUND)]
    check_none("a pure room may import something that is not pure:", wrong)


def test_pure_rooms_have_no_io_clock_randomness_or_environment() -> None:
    wrong = []
    for module in modules():
        if module.room not in PURE | GROUND:
            continue
        for node, dotted in imports(module):
            parts = dotted.split(".")
            if {".".join(parts[: i + 1]) for i in range(len(parts))} & PURE_NEVER:
                wrong.append(f"{module.at(node)}: imports {dotted}")
        for node in nodes(module):
            if isinstance(node, ast.Call) and called(node) in PURE_NEVER_CALLS and module.room in PURE:
                wrong.append(f"{module.at(node)}: calls {called(node)}")
    check_none("these rooms are pure:", wrong)


def test_rooms_use_only_the_packages_that_are_open_to_them() -> None:
    wrong = []
    siblings = {path.stem for path in HOSTS.rglob("*.py")} | {path.name for path in HOSTS.glob("*/")}
    for module in modules():
        for node, dotted in imports(module):
            package = dotted.split(".")[0]
            if room_of(dotted) or package in sys.stdlib_module_names:
                continue
            if module.room == "hosts" and package in siblings:
                continue
            if module.room not in THIRD_PARTY.get(package, set()):
                wrong.append(f"{module.at(node)}: {module.room} imports {package}")
    check_none("not allowed by THIRD_PARTY in tests/test_architecture.py:", wrong)


def test_processes_start_only_in_their_room() -> None:
    wrong = []
    for module in modules():
        if module.room in STARTS_PROCESSES:
            continue
        for node, dotted in imports(module):
            if dotted.split(".")[0] in STARTING_MODULES or dotted in {f"os.{call}" for call in STARTING_CALLS}:
                wrong.append(f"{module.at(node)}: imports {dotted}")
        for node in nodes(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and called(node) in STARTING_CALLS:
                wrong.append(f"{module.at(node)}: calls {ast.unparse(node.func)}")
    check_none(f"only {', '.join(sorted(STARTS_PROCESSES))} may start a process:", wrong)


def test_only_the_programs_print() -> None:
    wrong = []
    for module in modules():
        if module.room in PRINTS | {"hosts"}:
            continue
        for node in nodes(module):
            if isinstance(node, ast.Call):
                target = ast.unparse(node.func)
                if target == "print" or target.startswith(("sys.stdout.write", "sys.stderr.write", "pprint")):
                    wrong.append(f"{module.at(node)}: {target}")
    check_none(f"only {', '.join(sorted(PRINTS))} may print:", wrong)


def docstrings(tree: ast.Module) -> set[int]:
    """Return the ids of the string nodes that are documentation: statements of their own."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def words(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield a module's names and strings; documentation and comments may mention what they like."""
    documentation = docstrings(module.tree)
    for node in nodes(module):
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(word := getattr(node, field, None), str):
                yield node, word
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in documentation:
            yield node, node.value if isinstance(node.value, str) else node.value.decode("latin-1")


def test_no_vendor_is_named_outside_the_vendors_rooms() -> None:
    wrong = []
    for module in modules():
        if module.room in NAMES_VENDORS:
            continue
        for node, word in words(module):
            if named := [vendor for vendor in VENDORS if vendor in word.lower()]:
                wrong.append(f"{module.at(node)}: {', '.join(named)} in {word[:60]!r}")
    check_none(f"vendors are named only in {', '.join(sorted(NAMES_VENDORS))}:", wrong)


def test_hosts_never_import_the_runtime() -> None:
    assert not allowed("hosts") & {"runtime", "serve", "cli", "workspace", "receipts"}


def struct_fields(module: Module) -> Iterator[tuple[ast.AnnAssign, str]]:
    for node in nodes(module):
        if isinstance(node, ast.ClassDef) and any("Struct" in ast.unparse(base) for base in node.bases):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field, f"{node.name}.{field.target.id}"


def test_no_struct_has_a_float_of_our_own() -> None:
    wrong = []
    for module in modules():
        for field, name in struct_fields(module):
            types = {node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)}
            is_setting = module.room in SETTINGS and name.endswith(("_s", "_usd"))
            if "float" in types and name not in FLOATS_OF_THE_CONTRACT and not is_setting:
                wrong.append(f"{module.at(field)}: {name}")
    check_none("a float; use an integer with its unit in the name (or see FLOATS_OF_THE_CONTRACT, SETTINGS):", wrong)


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return called(value) in MUTABLE_MAKERS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def test_functions_import_only_what_few_runs_want() -> None:
    found = {
        f"{module.name.removeprefix('backplane.')}.{function.name}"
        for module in modules()
        for function in nodes(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and module.room not in LATE_ROOMS | {"hosts"}
        and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))
    }
    check_none("put the import at the top, or give its reason in LATE:", sorted(found ^ LATE.keys()))


def test_modules_keep_no_state() -> None:
    wrong = []
    for module in modules():
        if module.room == "hosts":  # a host is a program, alone in its process
            continue
        wrong += [f"{module.at(node)}: global" for node in nodes(module) if isinstance(node, ast.Global)]
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [ast.unparse(target) for target in targets]
                # A table written in capitals is a constant; `__all__` is Python's own.
                wrong += [f"{module.at(node)}: {name}" for name in names if name != "__all__" and not name.isupper()]
    check_none("module-level state:", wrong)


def test_no_type_name_is_defined_twice() -> None:
    found = doubles(sources("backplane") | sources("hosts"))
    twice = [f"{name}: {', '.join(places)}" for name, places in found.items()]
    check_none("a type name with two meanings; import the other one, or say in the name what this one is:", twice)


def test_the_schemas_are_what_the_contract_generates() -> None:
    if not (PACKAGE / "schemas").exists():
        assert not list((ROOT / "schemas").glob("*.json")), "schemas without their generator"
        return
    command = [sys.executable, "-P", "-m", "backplane.schemas", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"run `python3 xtask.py schema`:\n{done.stdout}{done.stderr}"
