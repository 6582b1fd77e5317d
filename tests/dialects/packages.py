"""Fetches the recordings of public packages: `python -m tests.dialects.packages FOLDER [PACKAGE …]`.

Test suites record what a model's service said, and some projects publish them with their sources. The newest source
archive of each package is read, never built or run, and only its recordings are kept: below `FOLDER/PACKAGE`, for
`tests.dialects.recorded` to judge. Recordings are other people's work and belong into a folder that is not committed.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import tarfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

from packaging.version import InvalidVersion, Version

PACKAGES = (
    "anthropic", "crewai", "langchain-anthropic", "langchain-aws", "langchain-groq", "langchain-openai",
    "langsmith", "langtrace-python-sdk", "magentic", "mirascope", "openai", "openai-agents",
    "openinference-instrumentation-google-genai", "opentelemetry-instrumentation-anthropic",
    "opentelemetry-instrumentation-google-genai", "opentelemetry-instrumentation-openai",
    "opentelemetry-instrumentation-openai-v2", "opentelemetry-instrumentation-vertexai", "strands-agents",
    "traceloop-sdk",
)  # fmt: skip
"""Those of some eighty looked at whose source archives held recordings (2026-11)."""
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
ARCHIVE = re.compile(r'href="([^"#]+/[^"#/]+?-(\d[^-"#/]*)\.tar\.gz)')
RECORDING = re.compile(r"(cassette|recordings/|fixtures).*\.(ya?ml|json|jsonl|txt|sse)(\.gz)?$", re.IGNORECASE)
TIMEOUT_S = 120


def newest(package: str) -> str:
    """Return the address of a package's newest source archive.

    Raises:
        LookupError: the index names no source archive.
    """
    with urllib.request.urlopen(f"{INDEX.rstrip('/')}/{package}/", timeout=TIMEOUT_S) as page:
        base, text = page.geturl(), page.read().decode()
    found = {version: str(match[1]) for match in ARCHIVE.finditer(text) if (version := read(match[2]))}
    if not found:
        raise LookupError(f"no source archive of {package} at {base}")
    return urljoin(str(base), found[max(found)])


def read(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def fetch(package: str, folder: Path) -> int:
    """Keep the recordings of a package's newest source archive below a folder; return how many there are."""
    with urllib.request.urlopen(newest(package), timeout=TIMEOUT_S) as answer:
        archive = io.BytesIO(answer.read())
    kept = 0
    with tarfile.open(fileobj=archive) as tar:
        for member in filter(lambda one: one.isfile() and RECORDING.search(one.name), tar):
            tar.extract(member, folder / package, filter="data")
            kept += 1
    return kept


def main(args: list[str]) -> int:
    """Fetch what is asked for, all that are known by default; return the exit code."""
    parser = argparse.ArgumentParser(prog="packages")
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    said = parser.parse_args(args)
    failed = 0
    for package in said.packages:
        try:
            print(f"{package}: {fetch(package, said.folder)} files", flush=True)
        except (OSError, LookupError, tarfile.TarError) as error:
            failed += 1
            print(f"{package}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
