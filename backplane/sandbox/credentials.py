"""Lists where people's credentials lie, and finds the stores to cover in one run.

A store is covered whatever the policy says: a host sees an empty folder or an empty file in its place. An order opens
some of them by `config.vendor.abp.credentials = ["git"]`, a backend by `credentials = ["git"]` in the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.unheard import nearest_name
from backplane.errors import PolicyError

STORES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        # Keys and certificates of a person.
        "ssh": (".ssh",),
        "gnupg": ("$GNUPGHOME", ".gnupg"),
        "keyrings": (".local/share/keyrings", ".local/share/kwalletd", ".pki"),
        "password-store": ("$PASSWORD_STORE_DIR", ".password-store"),
        "netrc": ("$NETRC", ".netrc", "_netrc"),
        # Services where code lies.
        "git": (".git-credentials", ".config/git/credentials", ".cache/git/credential"),
        "github": (".config/gh/hosts.yml", ".config/hub"),
        "gitlab": (".config/glab-cli",),
        # Clouds and clusters.
        "aws": ("$AWS_SHARED_CREDENTIALS_FILE", ".aws", ".boto", ".s3cfg"),
        "azure": ("$AZURE_CONFIG_DIR", ".azure"),
        "gcloud": ("$GOOGLE_APPLICATION_CREDENTIALS", "$CLOUDSDK_CONFIG", ".config/gcloud"),
        "oci": (".oci",),
        "digitalocean": (".config/doctl",),
        "cloudflare": (".config/.wrangler", ".wrangler", ".cloudflared"),
        "fly": (".fly/config.yml",),
        "kubernetes": ("$KUBECONFIG", ".kube"),
        "terraform": (".terraform.d/credentials.tfrc.json", ".terraformrc"),
        "vault": (".vault-token",),
        "1password": (".config/op",),
        "rclone": (".config/rclone",),
        # Registries of packages and images.
        "docker": ("$DOCKER_CONFIG/config.json", ".docker/config.json", ".config/containers/auth.json"),
        "helm": (".config/helm/registry",),
        "npm": ("$NPM_CONFIG_USERCONFIG", ".npmrc"),
        "yarn": (".yarnrc.yml",),
        "pypi": (".pypirc", ".config/pypoetry/auth.toml"),
        "cargo": ("$CARGO_HOME/credentials.toml", ".cargo/credentials.toml", ".cargo/credentials"),
        "rubygems": (".gem/credentials", ".local/share/gem/credentials", ".bundle/config"),
        "maven": (".m2/settings.xml", ".m2/settings-security.xml"),
        "gradle": (".gradle/gradle.properties",),
        "nuget": (".nuget/NuGet/NuGet.Config",),
        "composer": (".composer/auth.json", ".config/composer/auth.json"),
        "huggingface": ("$HF_TOKEN_PATH", ".cache/huggingface/token", ".cache/huggingface/stored_tokens"),
        # Databases.
        "postgres": ("$PGPASSFILE", ".pgpass"),
        "mysql": (".my.cnf", ".mylogin.cnf"),
        # Browsers: what they remember logs in.
        "firefox": (".mozilla", "snap/firefox", ".var/app/org.mozilla.firefox"),
        "chrome": (".config/google-chrome", ".config/chromium", "snap/chromium", ".var/app/com.google.Chrome"),
        "brave": (".config/BraveSoftware",),
        "edge": (".config/microsoft-edge",),
        # Logins of agents. Only the store of the agent that works with the user's own folder is open to it.
        "claude": ("$CLAUDE_CONFIG_DIR/.credentials.json", ".claude/.credentials.json", ".config/anthropic"),
        "codex": ("$CODEX_HOME/auth.json", ".codex/auth.json"),
        "gemini": (".gemini/oauth_creds.json", ".gemini/mcp-oauth-tokens.json", ".gemini/.env"),
        "qwen": (".qwen/oauth_creds.json",),
        "copilot": (".copilot/config.json", ".config/github-copilot"),
        "kimi": (".kimi/credentials", ".kimi/config.toml"),
        "opencode": (".local/share/opencode/auth.json", ".local/share/opencode/mcp-auth.json"),
        "cursor": (".cursor/cli-config.json", ".config/cursor/auth.json"),
    }
)
"""Name of a store → its places: below the home folder, or below a variable of the control plane's environment.

Put together from the documentation of each program, 2026-11.
"""


class Covered(msgspec.Struct, frozen=True):
    """The stores that exist, for one run."""

    places: Mapping[str, bool] = MappingProxyType({})
    """Absolute path, links followed → whether it is a folder."""
    names: tuple[str, ...] = ()
    """The stores they belong to."""
    left_open: tuple[str, ...] = ()
    """Stores that exist and are open to the host."""


def read_names(asked: Json, where: str) -> frozenset[str]:
    """Read the names of stores that shall stay open.

    Args:
        where: what an error calls the list.

    Raises:
        PolicyError: `policy_invalid`, it is no list of names, or there is no such store.
    """
    if asked is None:
        return frozenset()
    if not isinstance(asked, list | tuple) or not all(isinstance(name, str) for name in asked):
        raise PolicyError("policy_invalid", f"{where} is no list of names", hint='a list such as ["git", "npm"]')
    names = [str(name) for name in asked]
    for name in names:
        if name not in STORES:
            near = nearest_name(name, STORES)
            hint = f"did you mean {near!r}?" if near else f"one of: {', '.join(STORES)}"
            raise PolicyError("policy_invalid", f"{where} names {name[:40]!r}, which is no store we know", hint=hint)
    return frozenset(names)


def cover(
    root: str,
    originals: tuple[str, ...],
    writable: tuple[str, ...],
    homes: tuple[str, ...],
    kept: Collection[str],
    given: Collection[str] = (),
) -> Covered:
    """Find the stores of this machine, and which of them are covered. Blocking; one look at the disk a place.

    Args:
        root: the workspace; a store around it is open, because the user asked to work there.
        originals: what a staged root is a copy of: the copy has copies of the stores.
        writable: paths that the host may change: a store in one of them, or around one, is open.
        homes: home folders, of the user and of the host.
        kept: names of stores that stay open.
        given: values of the host's environment; a path among them stays open.
    """
    places: dict[str, bool] = {}
    names: dict[str, None] = {}
    left_open: dict[str, None] = {}
    for name, spots in STORES.items():
        for path in dict.fromkeys(path for spot in spots for path in _paths(spot, homes)):
            try:
                os.lstat(path)
            except (OSError, ValueError):  # not there; a variable that holds no path
                continue
            named, path = path in given, os.path.realpath(path)
            if (
                named
                or name in kept
                or within(root, path)
                or any(within(path, own) or within(own, path) for own in writable)
            ):
                left_open[name] = None
                continue
            copies = [root + path[len(tree.rstrip("/")) :] for tree in originals if within(path, tree)]
            for place in (path, *copies):
                names[name] = None
                places[place] = os.path.isdir(path)
    return Covered(outermost(places), tuple(names), tuple(left_open))


def has_stores(folder: str) -> bool:
    """Return True if a copy of a folder would have copies of stores. Blocking."""
    return any(within(path, os.path.realpath(folder)) for path in cover("", (), (), homes_of(None), ()).places)


def store_of(name: str) -> str | None:
    """Return the path of a program's login; None if there is none. Blocking."""
    paths = (path for spot in STORES.get(name, ()) for path in _paths(spot, homes_of(None)))
    return next((path for path in paths if os.path.exists(path)), None)


def homes_of(home: str | None) -> tuple[str, ...]:
    """Return the folders in which stores are searched: the user's home, and the host's if that is another."""
    return tuple(dict.fromkeys(path for path in (home, os.path.expanduser("~")) if path and path[0] == "/"))


def _paths(spot: str, homes: tuple[str, ...]) -> list[str]:
    """Return the paths of a spot of the table; several if there are several homes, or a variable names a list."""
    if not spot.startswith("$"):
        return [os.path.join(home, spot) for home in homes]
    variable, slash, rest = spot[1:].partition("/")
    folders = os.environ.get(variable, "").split(os.pathsep)
    return [folder + slash + rest for folder in folders if folder.startswith("/")]


def outermost(found: Mapping[str, bool]) -> dict[str, bool]:
    """Return these paths without those in a folder among them.

    Args:
        found: absolute path → whether it is a folder.
    """
    kept: dict[str, bool] = {}
    folder = None
    for path in sorted(found, key=lambda path: f"{path}/"):
        if folder is None or not below(path, folder):
            kept[path] = found[path]
            folder = path if found[path] else None
    return kept


def within(path: str, folder: str) -> bool:
    """Return True if a path is a folder or lies in it; both absolute, links followed."""
    return path == folder or below(path, folder)


def below(path: str, folder: str) -> bool:
    """Return True if a path lies in a folder, at any depth; both absolute, links followed."""
    return path != folder and path.startswith(folder.rstrip("/") + "/")
