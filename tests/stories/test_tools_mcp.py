"""Stories of `tests/all/doors/test_tools_mcp.py` that belong to the core; the rest takes longer."""

from __future__ import annotations

from tests.all.doors.test_tools_mcp import (  # noqa: F401
    test_a_server_is_started_and_its_tool_called_and_nothing_of_it_stays,
)
