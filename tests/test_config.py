"""Settings: the file, the environment and flags, and where state and a child's environment come from."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backplane import config
from backplane.config import BackendSettings, HookSettings, Limits, ServerSettings, Settings
from backplane.contract.work import PolicyProfile
from backplane.errors import ConfigError, StoreError

HERE = Path("/somewhere")


def parse(text: str, folder: Path = HERE) -> Settings:
    return config.parse(text.encode(), source="b.toml", folder=folder)


def fault(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(ConfigError) as caught:
        config.parse(data, source="b.toml", folder=HERE)
    assert caught.value.code == "config_invalid"
    return caught.value.message


# The file -------------------------------------------------------------------------------------------------------------


def test_an_empty_file_gives_the_built_in_settings() -> None:
    assert parse("") == Settings()
    assert Settings().limits.hello_s == 10.0
    assert Settings().limits.run_s is None


def test_the_policy_may_be_a_table_and_its_names_are_checked() -> None:
    settings = parse('policy.deny_write = ["**/.git/**"]\n[limits]\nhello_s = 3')
    assert settings.policy == PolicyProfile(deny_write=("**/.git/**",))
    assert parse("[policy]").policy == PolicyProfile()
    assert "line 2: `policy.denywrite`: no such name; known here are allowed_tools" in fault("[policy]\ndenywrite = []")
    assert "`policy.deny_write`" in fault('[policy]\ndeny_write = "x"')


def test_an_error_in_one_of_several_tables_names_the_table() -> None:
    rows = '[gateway.clients.a]\nkey_sha256 = "HASH"\n[gateway.clients.b]\nkey_sha256 = "HASH"\nbudget_usd = "x"\n'
    found = fault(rows.replace("HASH", "0" * 64))
    assert "line 5: `gateway.clients.b.budget_usd`: " in found
    assert "line 3: `backends.mine.env.B`: " in fault('[backends.mine]\nenv.A = "x"\nenv.B = 3')
    assert "`routing.models.m.prices`: " in fault("[routing.models.m]\nprices = 3")
    assert "`hooks.env`: " in fault('[[hooks]]\nenv = { A = 3 }\ncommand = ["x"]\nevents = ["run_end"]')


def test_a_whole_file_is_read() -> None:
    text = """
        default_backend = "mine"
        isolation = "required"
        policy = "policy.json"
        [limits]
        hello_s = 3
        runs_max = 2
        [backends.mine]
        command = ["node", "./host.mjs", "--fast"]
        env = { KEY = "$MINE", LEVEL = "info" }
        idle_s = 60.5
        [backends.far]
        command = ["ssh", "there", "backplane", "serve"]
        remote = true
        [backends.agent]
        host = "mock"
        options = { depth = 3, names = ["a"] }
    """
    settings = parse(text)
    mine = settings.backends["mine"]
    assert mine.command == ("node", "/somewhere/host.mjs", "--fast")
    assert mine.env == {"KEY": "$MINE", "LEVEL": "info"}
    assert settings.policy == "/somewhere/policy.json"
    assert settings.limits.hello_s == 3.0
    assert mine.limits_over(settings.limits) == Limits(hello_s=3.0, runs_max=2, idle_s=60.5)
    assert settings.backends["far"].remote
    assert settings.backends["agent"].options == {"depth": 3, "names": ["a"]}


@pytest.mark.parametrize(
    ("program", "found"), [("./bin/it", "/somewhere/bin/it"), ("it", "it"), ("/opt/it", "/opt/it"), (3, 3)]
)
def test_an_agents_program_is_found_from_any_folder(program: Any, found: Any) -> None:
    settings = parse(f"[backends.mine]\nhost = 'acp'\noptions = {{ program = {program!r} }}")
    assert settings.backends["mine"].options == {"program": found}


@pytest.mark.parametrize(
    ("text", "line", "names"),
    [
        ("colour = 3", 1, "`colour`: no such name"),
        ("\n\n[limits]\nhello = 3", 4, "`limits.hello`: no such name; known here are hello_s"),
        ("[routing.models.m]\ncontext_tokns = 1", 2, "`routing.models.m.context_tokns`: no such name; known"),
        ('[[hooks]]\nevnt = "pre_tool"', None, "`hooks.evnt`: no such name; known here are event"),
        ("[limits]\nhello_s = 0", 2, "`limits.hello_s`"),
        ("[limits]\nhello_s = nan", 2, "`limits.hello_s`"),
        ("[limits]\nhello_s = 1\nhello_s = 2", None, "Cannot overwrite"),
        ("limits = 3", 1, "`limits`"),
        ("backends = 3", 1, "`backends` must be a table"),
        ("[backends]\nx = 3", 2, "`backends.x`"),
        ("# a\n[backends.x]", 2, "exactly one of `command` and `host`"),
        ("[backends.x]\ncommand = []", 1, "names no program"),
        ("[backends.x]\ncommand = ['a',\n  3,\n]", 2, "`backends.x.command`"),
        ("[backends.y]\nhost='a'\n[backends.x]\nhost = 'a'\nhost_s = 3", 5, "`backends.x.host_s`"),
        ("[backends.x]\nhost = 'a'\nenv = {A = 3}", 3, "`backends.x.env.A`"),
        ("[backends.'a b']\nhost = 'a'", 1, "cannot have the name 'a b'"),
        ("isolation = 'maybe'", 1, "`isolation`: 'maybe' is none of 'best_effort', 'off', 'required'"),
        ("[routing]\nstrategy = 'cheap'", 2, "`routing.strategy`: 'cheap' is none of 'balanced', 'cost'"),
        (
            '[[hooks]]\nevent = "before"\ncommand = ["a"]',
            None,
            "`hooks.event`: 'before' is none of 'post_tool', 'pre_tool'",
        ),
        ("[backends.a]\nhost = 'a'\nrun_s = 1\n[backends.b]\nhost = 'b'\nrun_s = 'x'", 6, "`backends.b.run_s`"),
        ("[limits]\nwrite_s = 1", 2, "`limits.write_s`: no such name"),
        ("x = [", None, "not readable as TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_line(text: str, line: int | None, names: str) -> None:
    message = fault(text)
    assert names in message
    assert message.startswith(f"b.toml, line {line}: " if line is not None else "b.toml: ")


def wrongly(**members: Any) -> Any:
    """Settings that a program built with values of other types than declared."""
    return Settings(**members)


@pytest.mark.parametrize(
    ("built", "names"),
    [
        (
            wrongly(isolation="require"),
            "the settings: `isolation`: 'require' is none of 'best_effort', 'off'",
        ),
        (wrongly(isolation=None), "`isolation`"),
        (Settings(limits=Limits(idle_s=float("nan"))), "`limits.idle_s`: Expected `number` > 0.0"),
        (Settings(limits=Limits(runs_max=0)), "`limits.runs_max`: Expected `integer` >= 1"),
        (wrongly(limits=Limits(run_s="1")), "`limits.run_s`: Expected `number | null`, got `string`"),  # type: ignore[arg-type]
        (wrongly(backends=[]), "`backends` must be a table"),
        (wrongly(backends={"m": {}}), "exactly one of `command` and `host`"),
        (wrongly(backends={"m": BackendSettings(command="echo hi")}), "`backends.m.command`"),  # type: ignore[arg-type]
        (
            wrongly(hooks=[{"event": "before", "command": ["a"]}]),
            "`hooks.event`: 'before' is none of 'post_tool', 'pre_tool'",
        ),
        (wrongly(routing={"strategy": "cheap"}), "`routing.strategy`: 'cheap' is none of 'balanced', 'cost'"),
    ],
)
def test_wrong_settings_of_a_program_are_refused_as_those_of_a_file(built: Settings, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.checked(built)
    assert caught.value.code == "config_invalid"
    assert names in caught.value.message
    assert len(caught.value.message) < 2000


def test_settings_of_a_program_may_have_what_a_files_table_has() -> None:
    rough = wrongly(
        backends={"m": {"host": "api", "options": {"model": "x"}}, "c": BackendSettings(command=["a", Path("b")])},  # type: ignore[arg-type]
        limits={"run_s": 5},
        hooks=[{"event": "pre_tool", "command": ["a"]}],
        policy={"deny_read": ["x"]},
        mcp_servers={"s": {"command": ["relative/program"]}},
    )
    assert config.checked(rough) == Settings(
        backends={
            "m": BackendSettings(host="api", options={"model": "x"}),
            "c": BackendSettings(command=("a", "b")),
        },
        limits=Limits(run_s=5.0),
        hooks=(HookSettings(event="pre_tool", command=("a",)),),
        policy=PolicyProfile(deny_read=("x",)),
        mcp_servers={"s": ServerSettings(command=("relative/program",))},
    )


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text_gives_settings_or_one_error(text: str) -> None:
    with suppress(ConfigError):
        assert isinstance(parse(text), Settings)


def test_a_relative_path_in_a_command_counts_from_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "host.py").touch()
    (tmp_path / "etc").mkdir()
    words = ("bin/start", "host.py", "../up.js", "-x", "/abs", "etc", "word", "a/b")
    assert config.absolute_command(words, tmp_path) == (
        f"{tmp_path}/bin/start", f"{tmp_path}/host.py", f"{tmp_path}/../up.js", "-x", "/abs", "etc", "word", "a/b",
    )  # fmt: skip
    assert config.absolute_command(("python3", "x" * 5000, "nul\0"), tmp_path)[0] == "python3"


def test_a_shipped_policy_is_a_name_and_not_a_file() -> None:
    assert parse("policy = 'strict'").policy == "strict"
    assert parse("policy = './strict'").policy == "/somewhere/strict"


# Where it is --------------------------------------------------------------------------------------------------------


def test_the_file_is_the_named_one_else_the_folders_else_the_users(tmp_path: Path) -> None:
    cwd, user = tmp_path / "cwd", tmp_path / "user"
    (user / "backplane").mkdir(parents=True)
    cwd.mkdir()
    environ = {"XDG_CONFIG_HOME": str(user), "HOME": "/nowhere"}

    def chosen(path: Path | None = None, **more: str) -> str | None:
        return config.load(path, environ | more, cwd).default_backend

    assert chosen() is None
    (user / "backplane" / "backplane.toml").write_text('default_backend = "user"')
    assert chosen() == "user"
    (cwd / "backplane.toml").write_text('default_backend = "folder"')
    assert chosen() == "folder"
    (cwd / "variable.toml").write_text('default_backend = "variable"')
    assert chosen(BACKPLANE_CONFIG="variable.toml") == "variable"
    (cwd / "named.toml").write_text('default_backend = "named"')
    assert chosen(Path("named.toml"), BACKPLANE_CONFIG="variable.toml") == "named"


def test_the_users_file_is_below_home_without_xdg(tmp_path: Path) -> None:
    file = tmp_path / ".config" / "backplane" / "backplane.toml"
    file.parent.mkdir(parents=True)
    file.touch()
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "relative"}
    assert config.find_file(environ, tmp_path / "cwd") == file


@pytest.mark.parametrize("name", ["missing.toml", ".", "nul\0"])
def test_a_named_file_that_cannot_be_read_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(Path(name), {}, tmp_path)


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="over 1048576 bytes"):
        config.load(Path("/dev/zero"), {}, tmp_path)


# Merging ------------------------------------------------------------------------------------------------------------


def test_flags_go_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "backplane.toml"
    file.write_text(
        "isolation = 'off'\n[limits]\nidle_s = 1\nhello_s = 1\nrun_s = 1\n[backends.b]\nhost = 'x'\nidle_s = 9"
    )
    environ = {"BACKPLANE_IDLE_S": "2", "BACKPLANE_HELLO_S": "2", "BACKPLANE_POLICY": "p.json", "BACKPLANE_RUN_S": ""}
    settings = config.load(None, environ, tmp_path, {"hello_s": 3.5, "isolation": None, "runs_max": 4})
    assert settings.limits == Limits(idle_s=2.0, hello_s=3.5, run_s=1.0, runs_max=4)
    assert settings.isolation == "off"
    assert settings.policy == str(tmp_path / "p.json")
    # What is said for this one call counts more than what the file says for one backend.
    assert settings.backends["b"].limits_over(settings.limits).idle_s == 2.0


def test_a_wrong_word_in_a_variable_or_flag_is_told_with_the_choices() -> None:
    choices = "'yes' is none of 'best_effort', 'off', 'required'"
    with pytest.raises(ConfigError, match=f"BACKPLANE_ISOLATION: {choices}"):
        config.load(None, {"BACKPLANE_ISOLATION": "yes", "HOME": "/nowhere"}, HERE)
    with pytest.raises(ConfigError, match=choices):
        config.load(None, {"HOME": "/nowhere"}, HERE, {"isolation": "yes"})


@pytest.mark.parametrize("value", ["x", "0", "nan"])
def test_a_wrong_variable_is_an_error_that_names_it(value: str) -> None:
    with pytest.raises(ConfigError, match="BACKPLANE_IDLE_S"):
        config.load(None, {"BACKPLANE_IDLE_S": value, "HOME": "/nowhere"}, HERE)


def test_variables_that_mean_nothing_are_found() -> None:
    environ = {"BACKPLANE_IDEL_S": "3", "BACKPLANE_IDLE_S": "3", "BACKPLANE_HOME": "/x", "OTHER": ""}
    assert config.unknown_variables(environ) == ["BACKPLANE_IDEL_S"]


# State --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"BACKPLANE_HOME": "/b", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/b"),
        ({"BACKPLANE_HOME": "", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/backplane"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/backplane"),
    ],
)
def test_state_lives_where_the_environment_says(environ: dict[str, str], place: str) -> None:
    assert config.home_path(environ) == Path(place)


def test_without_home_the_systems_list_of_users_knows_it() -> None:
    assert config.home_path({}).is_absolute()


def test_the_state_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    home = config.home({"XDG_STATE_HOME": str(tmp_path / "a" / "b")})
    assert home == tmp_path / "a" / "b" / "backplane"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert config.home({"BACKPLANE_HOME": str(home)}) == home


def test_a_state_directory_that_cannot_be_made_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"ENOTDIR|EEXIST") as caught:
        config.home({"BACKPLANE_HOME": str(tmp_path / "file" / "state")})
    assert caught.value.code == "receipt_store_failed"


# A child's environment ------------------------------------------------------------------------------------------------


def test_a_child_gets_what_it_needs_and_none_of_our_secrets() -> None:
    ours = {
        "PATH": "/bin", "HOME": "/h", "LANG": "C", "LC_ALL": "C", "TZ": "UTC", "TERM": "x", "TMPDIR": "/t",
        "https_proxy": "p", "NO_PROXY": "n", "SSL_CERT_FILE": "c", "NODE_EXTRA_CA_CERTS": "n",
        "API_KEY": "secret", "BACKPLANE_HOME": "/b", "LD_PRELOAD": "evil.so", "PYTHONPATH": "/p", "SSH_AUTH_SOCK": "s",
    }  # fmt: skip
    child = config.child_environment({"A": "settings", "B": "settings"}, {"B": "order", "TZ": "CET"}, ours)
    kept = {name: ours[name] for name in list(ours)[:11]}
    assert child == kept | {"A": "settings", "B": "order", "TZ": "CET"}


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"": "x"}, {"A": "x\0y"}])
def test_a_variable_that_cannot_be_set_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cannot be set"):
        config.child_environment({}, env, {})


@pytest.mark.parametrize("fields", [{}, {"command": ("a",), "host": "b"}, {"command": ()}, {"command": ("",)}])
def test_a_backend_without_one_way_to_start_it_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"exactly one|names no program"):
        BackendSettings(**fields)
