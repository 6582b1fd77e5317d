"""A brute force for the router, written from `docs/guide/routing-rule.md` alone: slow, plain, and with nothing of ours.

Everything is plain JSON-like data; what the router is given is made from the same data by `tests/test_routing.py`.
"""

from __future__ import annotations

import zlib
from typing import Any

World = dict[str, Any]

TYPES: dict[str, tuple[list[str], int, int]] = {
    "simple_query": ([], 2_000, 500),
    "code_generation": (["tool_read", "tool_write"], 60_000, 6_000),
    "file_editing": (["tool_read", "tool_edit"], 40_000, 3_000),
    "shell_execution": (["tool_bash"], 20_000, 1_000),
    "code_review": (["tool_read"], 80_000, 3_000),
    "complex_workflow": (["tool_read", "tool_write", "tool_bash"], 300_000, 20_000),
    "custom": ([], 40_000, 4_000),
}
SHARE = {"low": 500, "normal": 900, "high": 1000, "critical": 1000}
MEETS = {
    "native": ["native"],
    "emulated": ["native", "emulated", "restricted"],
    "any": ["native", "emulated", "restricted", "unsupported"],
}


def up(one: int, other: int) -> int:
    return one // other + (1 if one % other else 0)


def measured(world: World, group: str, model: str | None, type_: str, what: str) -> int | None:
    runs = []
    for run in world["runs"]:
        if run["group"] != group or run["model"] != model or run[what] is None:
            continue
        if run["reason"] in ("refused", "cancelled", "interrupted", "store"):
            continue
        age = world["now_ms"] - run["began_ms"]
        days = age // (7 * 24 * 3600 * 1000)
        runs.append((run, 0 if age < 0 or days >= 20 else 2**20 // 2**days))
    of_type = [pair for pair in runs if pair[0]["type"] == type_]
    if len([pair for pair in of_type if pair[0]["complete"] and pair[1]]) >= 3:
        runs = of_type
    below = sum(weight for run, weight in runs if run["complete"])
    if below == 0:
        return None
    return up(sum(weight * run[what] for run, weight in runs), below)


def cost_of(world: World, task: Any, backend: Any, model: Any) -> tuple[str, int] | None:
    found = measured(world, backend["group"], model["name"], task["type"], "cost")
    if found is not None:
        return "measured", found
    if model["prices"] is None:
        return None
    basis, sent, made = "assumed", TYPES[task["type"]][1], TYPES[task["type"]][2]
    if task["input_tokens"] is not None and task["output_tokens"] is not None:
        basis, sent, made = "priced", task["input_tokens"], task["output_tokens"]
    return basis, up(sent * model["prices"][0] + made * model["prices"][1], 1_000_000)


def obstacles(world: World, task: Any, backend: Any, model: Any) -> list[str]:
    found = []
    now = world["now_ms"]
    if backend["named_only"]:
        found.append("named_only")
    if not backend["ready"]:
        found.append("not_ready")
    if backend["name"] in world["tried"]:
        found.append("tried")
    if now < backend["circuit_until_ms"]:
        found.append("circuit_open")
    per_minute = backend["runs_per_minute"]
    if now < backend["limited_until_ms"] or (per_minute is not None and backend["began_last_minute"] >= per_minute):
        found.append("rate_limited")
    if backend["running"] >= max(1, backend["runs_max"] * SHARE[task["priority"]] // 1000):
        found.append("full")
    required = [tuple(pair) for pair in task["capabilities"]]
    for name in TYPES[task["type"]][0]:
        if (name, "emulated") not in required:
            required.append((name, "emulated"))
    if required and backend["manifest"] is None:
        found.append("manifest_unknown")
    elif required:
        for name, least in required:
            if backend["manifest"].get(name) not in MEETS[least]:
                found.append("capability")
    if task["preference"] == "specific" and model["name"] != task["model"]:
        found.append("model")
    sent, made = task["input_tokens"] or 0, task["output_tokens"] or 0
    if model["context_tokens"] is not None and sent + made > model["context_tokens"]:
        found.append("context")
    if model["output_tokens"] is not None and made > model["output_tokens"]:
        found.append("output")
    names = (backend["name"], f"{backend['name']}/{model['name']}")
    if task["preference"] == "quality" and not any(name in world["quality"] for name in names):
        found.append("quality")
    if task["max_cost_usd_micros"] is not None:
        cost = cost_of(world, task, backend, model)
        if cost is None or cost[0] == "assumed":
            found += [] if task["allow_unknown"] else ["cost_unknown"]
        elif cost[1] > task["max_cost_usd_micros"]:
            found.append("cost")
    if task["max_latency_ms"] is not None:
        latency = measured(world, backend["group"], model["name"], task["type"], "duration")
        if latency is None:
            found += [] if task["allow_unknown"] else ["latency_unknown"]
        elif latency > task["max_latency_ms"]:
            found.append("latency")
    return found


def choices(world: World, task: Any) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """For every strategy the option that wins, and for every option its obstacles."""
    every: list[dict[str, Any]] = []
    for backend in world["backends"]:
        for model in backend["models"]:
            name = backend["name"] if model["name"] is None else f"{backend['name']}/{model['name']}"
            every.append(
                {
                    "name": name,
                    "backend": backend,
                    "model": model,
                    "place": len(every),
                    "obstacles": obstacles(world, task, backend, model),
                }
            )
    left = [option for option in every if not option["obstacles"]]
    for option in left:
        cost = cost_of(world, task, option["backend"], option["model"])
        option["cost"] = None if cost is None else cost[1]
        option["latency"] = measured(
            world, option["backend"]["group"], option["model"]["name"], task["type"], "duration"
        )
    won = {}
    for strategy in ("first_available", "cost", "latency", "balanced", "quality"):
        best = None
        for option in left:
            key = [*_key(world, strategy, option, left), *_ties(world, option)]
            if best is None or key < best[0]:
                best = (key, option["name"])
        won[strategy] = None if best is None else best[1]
    replaced = {"speed": "latency", "quality": "quality", "cost": "cost"}.get(task["preference"])
    names = ("first_available", "cost", "latency", "balanced")
    return {name: won[replaced or name] for name in names}, {option["name"]: option["obstacles"] for option in every}


def _key(world: World, strategy: str, option: Any, left: list[Any]) -> list[int]:
    if strategy == "first_available":
        return []
    if strategy in ("cost", "latency"):
        return [1, 0] if option[strategy] is None else [0, option[strategy]]
    if strategy == "quality":
        found = [option["name"], option["backend"]["name"]]
        return [next((world["quality"].index(name) for name in found if name in world["quality"]), 0)]
    total = 0
    for what in ("cost", "latency"):
        largest = max([other[what] for other in left if other[what] is not None], default=0)
        if option[what] is None:
            total += 1000
        elif largest:
            total += 1000 * option[what] // largest
    return [total]


def _ties(world: World, option: Any) -> list[int]:
    backend = option["backend"]
    groups = [other["group"] for other in world["backends"]]
    spread = 0
    if groups.count(backend["group"]) > 1:
        spread = zlib.crc32(f"{world['seed']}:{backend['name']}".encode())
    return [
        groups.index(backend["group"]),
        1000 * backend["running"] // backend["runs_max"],
        spread,
        option["place"],
    ]
