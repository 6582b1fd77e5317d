"""Where a backend asks its model's service: by an option, by the vendor's own variable, else at the vendor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from backplane.agents.order import without_version
from backplane.cli.doctor import examine
from backplane.config import BackendSettings, Settings
from backplane.errors import ConfigError
from backplane.runtime import backends
from backplane.testing import ModelServer, Turn
from backplane.upstream import presets

GATE = "https://gate.example/llm"
AGENTS = {
    "claude": "ANTHROPIC_BASE_URL",
    "codex": "OPENAI_BASE_URL",
    "copilot": "COPILOT_PROVIDER_BASE_URL",
    "gemini": "GOOGLE_GEMINI_BASE_URL",
    "kimi": "KIMI_MODEL_BASE_URL",
    "qwen": "OPENAI_BASE_URL",
}
PRESETS = {
    "anthropic": ("ANTHROPIC_BASE_URL", "/v1"),
    "openai": ("OPENAI_BASE_URL", ""),
    "openai_chat": ("OPENAI_BASE_URL", ""),
    "gemini": ("GOOGLE_GEMINI_BASE_URL", "/v1beta"),
}


def found(name: str, environ: dict[str, str], **declared: Any) -> backends.ProcessBackend:
    declared.setdefault("host", name)
    return backends.find(name, Settings(backends={name: BackendSettings(**declared)}), environ)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agents_own_variable_names_its_service(name: str) -> None:
    variable = AGENTS[name]
    by_ours = found(name, {variable: GATE})
    by_its_own = found(name, {variable: "https://other.example"}, env={variable: GATE})
    for backend in (by_ours, by_its_own):
        assert backend.agent is not None
        assert backend.agent.base_url == GATE
        assert "gate.example:443" in backend.endpoints
        told = msgspec.json.decode(backend.env["BACKPLANE_AGENT_OPTIONS"])
        assert told["base_url"] == GATE


@pytest.mark.parametrize("name", AGENTS)
def test_an_option_goes_before_the_variable(name: str) -> None:
    backend = found(name, {AGENTS[name]: "https://other.example"}, options={"base_url": GATE})
    assert backend.agent is not None
    assert backend.agent.base_url == GATE


@pytest.mark.parametrize("name", AGENTS)
def test_a_variable_that_is_no_address_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=AGENTS[name]):
        found(name, {AGENTS[name]: "gate"})


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("has_version", [False, True])
def test_a_presets_variable_names_its_service_with_or_without_the_version(name: str, has_version: bool) -> None:
    variable, version = PRESETS[name]
    options = {"preset": name, "model": "m"}
    environ = {variable: GATE + (version if has_version else ""), presets.PRESETS[name].key_env or "": "k" * 20}
    for backend in (
        found("one", environ, host="api", options=options),
        found("one", {**environ, variable: "https://other.example"}, host="api", options=options,
              env={variable: environ[variable]}),
    ):  # fmt: skip
        service = presets.read_options(msgspec.json.decode(backend.env[presets.OPTIONS]), "the options")
        assert service.base_url == GATE + version
        assert "gate.example:443" in backend.endpoints


@pytest.mark.parametrize(
    ("address", "bare"),
    [("https://a.example", "https://a.example"), ("https://a.example/v1", "https://a.example"),
     ("https://a.example/llm/v1beta/", "https://a.example/llm"), ("https://v1.example", "https://v1.example")],
)  # fmt: skip
def test_a_program_that_adds_the_version_is_told_the_address_without(address: str, bare: str) -> None:
    assert without_version(address) == bare


def test_the_scripted_model_has_no_path_with_a_version_twice() -> None:
    with ModelServer([Turn(text="hello", times=None)]) as server:
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        codes = [httpx.post(f"{server.url}{path}/messages", json=body).status_code for path in ("/v1", "/v1/v1")]
    assert codes == [200, 404]


def test_doctor_says_where_each_backend_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    file = tmp_path / "backplane.toml"
    file.write_text(
        f'[backends.mine]\nhost = "claude"\noptions = {{ program = "{program}" }}\n'
        '[backends.far]\nhost = "api"\noptions = { preset = "anthropic" }\n'
    )
    environ = {"ANTHROPIC_BASE_URL": GATE, "ANTHROPIC_API_KEY": "k" * 20, "HOME": str(tmp_path), "PATH": "/usr/bin"}
    told = {(one.name, one.fact) for one in examine(environ, tmp_path, file)}
    assert any(name == "backend mine" and f"asks {GATE}" in fact for name, fact in told)
    assert ("service far", f"address {GATE}/v1") in told
