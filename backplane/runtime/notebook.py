"""Formats an ended run as the HTML table that a notebook shows. Pure."""

from __future__ import annotations

from html import escape
from pathlib import Path

from backplane.contract.receipt import Receipt
from backplane.errors import BackplaneError


def table(receipt: Receipt, error: BackplaneError | None, patch: Path | None) -> str:
    """Return a run's outcome, error, backend, time, tokens, cost and patch as an HTML table."""
    usage = receipt.usage
    tokens = (usage.input_tokens, usage.output_tokens)
    rows = {
        "outcome": receipt.outcome,
        "error": error,
        "backend": receipt.backend.id,
        "took": f"{receipt.meta.duration_ms / 1000:.1f} s",
        "tokens in / out": " / ".join("?" if count is None else f"{count:,}" for count in tokens),
        "cost": "?" if usage.estimated_cost_usd is None else f"${usage.estimated_cost_usd:.4f}",
        "patch": patch,
        "run": receipt.meta.run_id,
    }
    cells = (
        f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
        if value is not None
    )
    return f"<table>{''.join(cells)}</table>"
