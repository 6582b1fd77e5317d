"""`doctor`'s checks of the configured MCP servers: programs and variables, and with `--probe` their tools.

A program is only looked for, unless the caller wants it started; an address likewise.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from backplane.errors import BackplaneError
from backplane.upstream.baseurl import Check
from backplane.view.figures import counted

if TYPE_CHECKING:
    from backplane.config import ServerSettings, Settings

TOOLS_MAX: Final = 8
"""Names that one line tells; more are counted."""


def check_servers(
    settings: Settings, environ: Mapping[str, str], cwd: str, *, over_network: bool
) -> Iterator[tuple[str, Check]]:
    """Look at every configured server, or start and ask it; yields its name with what was found."""
    from backplane.runtime.backends import server_row

    for name, asked in settings.mcp_servers.items():
        try:
            row = server_row(name, asked, environ, [])
        except BackplaneError as error:
            yield name, Check("missing", error.message, error.hint or "")
            continue
        check = _looked(asked, row, environ)
        if over_network and check.state == "ok":
            check = _asked(name, row, environ, cwd)
        yield name, check


def _looked(asked: ServerSettings, row: Mapping[str, Any], environ: Mapping[str, str]) -> Check:
    if asked.url is not None:
        parts = urlsplit(asked.url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return Check("ok", f"{asked.url}; --probe asks it", "")
        return Check("missing", f"{asked.url} is no address of a server", 'url = "https://HOST/PATH"')
    assert asked.command is not None
    program = asked.command[0]
    found = shutil.which(program, path={**environ, **row.get("env", {})}.get("PATH"))
    if found is None:
        return Check("missing", f"its program {program} is not found or not executable", "install it, or name its path")
    return Check("ok", f"{found}; --probe starts it", "")


def _asked(name: str, row: Mapping[str, Any], environ: Mapping[str, str], cwd: str) -> Check:
    import anyio

    from backplane.tools.mcp import open_servers

    faults: list[str] = []

    async def warn(_: str, words: str) -> None:
        faults.append(words)

    async def ask() -> list[str]:
        async with open_servers({name: row}, env=dict(environ), cwd=cwd, warn=warn) as servers:
            return [spec.name for spec in servers.specs]

    tools = anyio.run(ask)
    if faults:
        return Check("missing", faults[0], "run its command by hand, or take it out of the configuration")
    more = f" and {len(tools) - TOOLS_MAX} more" if len(tools) > TOOLS_MAX else ""
    return Check("ok", f"{counted(len(tools), 'tool')}: {', '.join(tools[:TOOLS_MAX])}{more}", "")
