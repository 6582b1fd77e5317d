"""210 tasks with the backend that each has to get, labelled by hand from stated facts and `contracts/routing.md`.

The facts are what the table below says: who is eligible, what a run costs, how long it takes. The labels were written
after the router, but before anything of it was changed and without looking at what it chooses. Money is in millionths
of a dollar a run, time in milliseconds.
"""

from __future__ import annotations

from typing import Any, Final

ALL: Final = {"tool_read": "native", "tool_write": "native", "tool_edit": "native", "tool_bash": "native"}

BACKENDS: Final[tuple[dict[str, Any], ...]] = (
    {"name": "chat", "abilities": {}, "cost": 1_000, "latency": 2_000, "context": 16_000, "output": 4_000},
    {"name": "flash", "abilities": {}, "cost": 4_000, "latency": 500, "context": 1_000_000, "output": 8_000},
    {"name": "reader", "abilities": {"tool_read": "native"}, "cost": 8_000, "latency": 10_000, "context": 200_000,
     "output": 8_000},
    {"name": "editor", "abilities": {"tool_read": "native", "tool_edit": "native"}, "cost": 12_000, "latency": 20_000,
     "context": 200_000, "output": 8_000},
    {"name": "writer", "abilities": {"tool_read": "native", "tool_write": "native"}, "cost": 20_000, "latency": 15_000,
     "context": 200_000, "output": 16_000},
    {"name": "runner", "abilities": {"tool_bash": "native"}, "cost": 10_000, "latency": 8_000, "context": 64_000,
     "output": 8_000},
    {"name": "agent", "abilities": {**ALL, "mcp_client": "native"}, "model": "medium", "cost": 50_000,
     "latency": 60_000, "of_review": (30_000, 40_000), "context": 200_000, "output": 32_000},
    {"name": "swift", "abilities": ALL, "model": "medium", "cost": 120_000, "latency": 25_000, "context": 400_000,
     "output": 16_000},
    {"name": "thrifty", "abilities": dict.fromkeys(ALL, "emulated"), "cost": 25_000, "latency": 180_000,
     "context": 200_000, "output": 8_000},
    {"name": "grand", "abilities": {**ALL, "mcp_client": "native", "image_input": "native"}, "model": "large",
     "cost": 400_000, "latency": 100_000, "context": 1_000_000, "output": 64_000},
    {"name": "fresh", "abilities": ALL, "cost": None, "latency": None},
    {"name": "listed", "abilities": ALL, "model": "medium", "cost": None, "latency": None, "prices": (1, 4),
     "context": 600_000, "output": 32_000},
    {"name": "down", "abilities": ALL, "cost": 1, "latency": 1, "state": "not_ready"},
    {"name": "tripped", "abilities": ALL, "cost": 1, "latency": 1, "state": "circuit_open"},
    {"name": "paused", "abilities": ALL, "cost": 1, "latency": 1, "state": "rate_limited"},
    {"name": "crowded", "abilities": ALL, "cost": 5_000, "latency": 5_000, "running": 9, "runs_max": 10},
    {"name": "stranger", "abilities": None, "cost": 2_000, "latency": 3_000, "context": 100_000, "output": 4_000},
    {"name": "shell", "abilities": ALL, "cost": 1, "latency": 1, "state": "named_only"},
)  # fmt: skip
"""In the order of the configuration. `abilities` None: no hello of it was ever heard. `prices`: dollars for a million
tokens sent and got. `of_review`: cost and latency of its three runs of the type `code_review`; all other runs are of no
type. A missing window or most output is unknown."""

QUALITY: Final = ("grand", "swift", "agent", "editor")

TYPES: Final = (
    "simple_query", "code_generation", "file_editing", "shell_execution", "code_review", "complex_workflow", "custom",
)  # fmt: skip
"""Who can take them, at priority `normal`: everybody of the first twelve and `stranger`; writer and the six that can
do all (agent to listed); editor and these; runner and these; reader, editor, writer and these; these; everybody."""

Row = tuple[dict[str, Any], tuple[str | None, ...], str]

ROWS: Final[tuple[Row, ...]] = (
    ({"strategy": "first_available"}, ("chat", "writer", "editor", "runner", "reader", "agent", "chat"),
     "the first in the configuration that can"),
    ({"strategy": "cost"}, ("chat", "writer", "editor", "runner", "reader", "thrifty", "chat"),
     "the least that was measured"),
    ({"strategy": "latency"}, ("flash", "writer", "editor", "runner", "reader", "swift", "flash"),
     "the shortest that was measured"),
    ({}, ("flash", "writer", "editor", "runner", "reader", "swift", "flash"),
     "balanced: of 1000, flash has 10 + 2 and chat 2 + 11; writer, editor, runner and reader lead in both parts but "
     "for thousandths; of those that can do all, swift has 300 + 138, agent 125 + 333, thrifty 62 + 1000"),
    ({"preference": "speed", "strategy": "cost"}, ("flash", "writer", "editor", "runner", "reader", "swift", "flash"),
     "the preference goes over the strategy: the shortest"),
    ({"preference": "cost", "strategy": "latency"}, ("chat", "writer", "editor", "runner", "reader", "thrifty", "chat"),
     "the preference goes over the strategy: the least"),
    ({"preference": "quality"}, ("grand",) * 7, "the first of the list of quality"),
    ({"preference": "quality", "max_cost_usd_micros": 200_000}, ("swift",) * 7, "grand costs 400,000"),
    ({"preference": "quality", "max_cost_usd_micros": 60_000}, ("agent",) * 7, "swift costs 120,000"),
    ({"preference": "quality", "max_latency_ms": 30_000}, ("swift",) * 7, "grand takes 100,000"),
    ({"preference": "quality", "max_cost_usd_micros": 15_000},
     ("editor", None, "editor", None, "editor", None, "editor"),
     "only editor is so cheap and in the list, and it cannot write or run"),
    ({"model": "medium", "strategy": "cost"}, ("listed", "agent", "agent", "listed", "agent", "agent", "agent"),
     "agent 50,000 (reviews 30,000), swift 120,000; listed by the type's tokens 4,000, 84,000, 52,000, 24,000, 92,000, "
     "380,000, 56,000"),
    ({"model": "medium", "strategy": "latency"}, ("swift",) * 7, "25,000 against 60,000, reviews 40,000, and unknown"),
    ({"model": "large", "strategy": "cost"}, ("grand",) * 7, "nobody else has it"),
    ({"strategy": "latency", "max_cost_usd_micros": 22_000},
     ("flash", "writer", "editor", "runner", "reader", None, "flash"), "thrifty costs 25,000"),
    ({"strategy": "cost", "max_latency_ms": 30_000},
     ("chat", "writer", "editor", "runner", "reader", "swift", "chat"), "thrifty takes 180,000, agent 60,000"),
    ({"strategy": "cost", "max_latency_ms": 70_000, "requires": {"tool_bash": "native"}},
     ("runner", "agent", "agent", "runner", "agent", "agent", "runner"),
     "runner can only run; how long listed takes is unknown, thrifty only emulates it"),
    ({"strategy": "cost", "requires": {"mcp_client": "native"}}, ("agent",) * 7, "50,000 against grand's 400,000"),
    ({"preference": "quality", "requires": {"mcp_client": "native"}}, ("grand",) * 7, "the first of the list has it"),
    ({"strategy": "first_available", "requires": {"image_input": "native"}}, ("grand",) * 7, "nobody else has it"),
    ({"strategy": "cost", "requires": {"tool_bash": "native"}},
     ("listed", "agent", "agent", "runner", "agent", "agent", "runner"),
     "listed by the type's tokens 4,000, 84,000, 52,000, 24,000, 92,000, 380,000, 56,000; runner 10,000; agent 50,000, "
     "reviews 30,000"),
    ({"strategy": "cost", "priority": "high"},
     ("chat", "crowded", "crowded", "crowded", "crowded", "crowded", "chat"),
     "nine of ten places are taken: high may have the tenth, at 5,000"),
    ({"strategy": "latency", "priority": "critical"},
     ("flash", "crowded", "crowded", "crowded", "crowded", "crowded", "flash"),
     "critical may have the tenth place, at 5,000 ms"),
    ({"strategy": "latency", "priority": "low"},
     ("flash", "writer", "editor", "runner", "reader", "swift", "flash"),
     "half of the places of nobody else are taken"),
    ({"strategy": "cost", "input_tokens": 500_000, "output_tokens": 2_000},
     ("flash", "grand", "grand", "grand", "grand", "grand", "flash"),
     "only flash, grand, listed and fresh can hold it; listed by its price 508,000"),
    ({"strategy": "latency", "input_tokens": 300_000, "output_tokens": 1_000},
     ("flash", "swift", "swift", "swift", "swift", "swift", "flash"),
     "the others hold 200,000 at most, grand is slower"),
    ({"strategy": "cost", "input_tokens": 10_000, "output_tokens": 30_000}, ("agent",) * 7,
     "agent, grand, listed and fresh give so much; listed by its price 130,000"),
    ({"model": "medium", "strategy": "cost", "input_tokens": 1_000, "output_tokens": 100}, ("listed",) * 7,
     "by its price 1,400"),
    ({"strategy": "cost", "max_cost_usd_micros": 1_000, "input_tokens": 1_000, "output_tokens": 100},
     ("chat", None, None, None, None, None, "chat"), "listed's 1,400 are too much, chat's 1,000 are not"),
    ({"strategy": "latency", "max_cost_usd_micros": 2_000, "allow_unknown": True},
     ("chat", "fresh", "fresh", "fresh", "fresh", "fresh", "chat"),
     "a known latency goes first, chat's before stranger's; of fresh and listed, both unknown, the first"),
)  # fmt: skip
"""What an order asks beside its type; who gets it, a column a type, None for nobody; and why."""
