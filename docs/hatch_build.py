"""What the package says of itself where it is shown outside of a checkout: README with links that lead somewhere there.

`BACKPLANE_URL` names where this version's files are read, as `https://HOST/PROJECT/blob/v0.1.0`: whoever publishes
sets it. Without it a link to a file of the checkout is its words alone, and a picture is left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def described(readme: str, url: str | None) -> str:
    """README with each relative link made absolute, or without it."""

    def placed(found: re.Match[str]) -> str:
        mark, words, path = found.groups()
        if url is None:
            return "" if mark else words
        return f"{mark}[{words}]({url.rstrip('/')}/{path})"

    return _LINK.sub(placed, readme)


class DescribedHook(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add what the environment decides."""
        url = os.environ.get("BACKPLANE_URL")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": described(text, url)}
        if url is not None:
            place = url.rstrip("/")
            metadata["urls"] = {
                "Source": place,
                "Documentation": f"{place}/README.md",
                "Changelog": f"{place}/CHANGELOG.md",
            }
