"""The site and the package's own description: whole, with links that lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from tests.peers import ROOT

BUILD_S_MAX = 100


def test_the_site_is_made_of_readme_contracts_examples_and_docstrings() -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: not installed")
    command = [sys.executable, "docs/build.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / ".cache" / "site"
    pages = {
        name: (site / name).read_text()
        for name in ("index.html", "python.html", "contracts/sidecar.html", "docs/guide/runs.html")
    }
    assert "Run any coding agent" in pages["index.html"]
    assert 'id="backplane.run"' in pages["python.html"]
    assert "hello" in pages["contracts/sidecar.html"]
    for text in pages.values():  # Readable from a disk, without anybody hearing of it.
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://[^"]*"', text)


def builder(folder: Path) -> Path:
    """The folder with what pip would fetch anew for each wheel."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S_MAX, check=False)
    if done.returncode != 0:
        pytest.skip("needs a package registry: " + done.stderr.strip().splitlines()[-1])
    return folder


def test_a_link_that_leads_nowhere_fails_the_check(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: not installed")
    for name in ("contracts", "docs", "hosts", "schemas"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "README.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    command = [sys.executable, "docs/build.py", "--links"]
    codes = []
    for words in ("", "[a page](docs/guide/none.md)\n"):
        with (tmp_path / "README.md").open("a") as file:
            file.write(words)
        codes.append(subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=BUILD_S_MAX).returncode)
    assert codes == [0, 1]


def wheel(folder: Path, tools: Path, url: str | None) -> tuple[list[str], str]:
    """Its metadata's headers as `Name: value`, and its description."""
    environ = {name: value for name, value in os.environ.items() if name != "BACKPLANE_URL"}
    environ |= {"PYTHONPATH": str(tools)} | ({} if url is None else {"BACKPLANE_URL": url})
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    command.append(str(ROOT))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=BUILD_S_MAX, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = BytesParser().parsebytes(archive.read(name))
    return [f"{key}: {value}" for key, value in message.items()], str(message.get_payload())


def test_the_package_says_what_it_is_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    tools = builder(tmp_path / "tools")
    for name, url in (("without", None), ("with", "https://code.example/backplane/blob/v0")):
        heads, description = wheel(tmp_path / name, tools, url)
        for wanted in (
            "Author: the backplane authors", "License-Expression: Apache-2.0", "Requires-Python: >=3.11",
            "Classifier: Operating System :: POSIX :: Linux", "Classifier: Typing :: Typed",
        ):  # fmt: skip
            assert wanted in heads
        assert any(head.startswith("Keywords: ") for head in heads)
        assert ("Project-URL: Changelog, https://code.example/backplane/blob/v0/CHANGELOG.md" in heads) == bool(url)
        links = re.findall(r"\]\(([^)]+)\)", description)
        assert all(re.match("https?://|#", link) for link in links)
        assert bool(links) == bool(url)
