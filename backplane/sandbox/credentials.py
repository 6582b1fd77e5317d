"""Lists where programs store people's credentials, and finds the stores to cover in one run.

A store is covered whatever the policy says: a host sees an empty folder or an empty file instead. An order opens
stores by `config.vendor.abp.credentials = ["git"]`, a backend by `credentials = ["git"]` in the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.unknown import nearest_name
from backplane.errors import PolicyError

STORES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        # Personal keys and certificates.
        "ssh": (".ssh",),
        "gnupg": ("$GNUPGHOME", ".gnupg"),
        "keyrings": (".local/share/keyrings", ".local/share/kwalletd", ".pki"),
        "password-store": ("$PASSWORD_STORE_DIR", ".password-store"),
        "netrc": ("$NETRC", ".netrc", "_netrc"),
        # Services that host code.
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
        # Browsers, whose profiles contain logins.
        "firefox": (".mozilla", "snap/firefox", ".var/app/org.mozilla.firefox"),
        "chrome": (".config/google-chrome", ".config/chromium", "snap/chromium", ".var/app/com.google.Chrome"),
        "brave": (".config/BraveSoftware",),
        "edge": (".config/microsoft-edge",),
        # Logins of agents. An agent can read its own store only if it works with the user's own folder.
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
"""Name of a store → its paths, below the home folder or a variable of the control plane's environment.

Compiled from each program's documentation in 2026-11.
"""


class Covered(msgspec.Struct, frozen=True):
    """The credential stores that exist for one run: those that the sandbox hides, and those that stay readable."""

    places: Mapping[str, bool] = MappingProxyType({})
    """Path to cover, absolute and with links followed → True for a folder."""
    names: tuple[str, ...] = ()
    """Names of the covered stores."""
    left_open: tuple[str, ...] = ()
    """Names of the existing stores that the host can read."""


def read_names(asked: Json, where: str) -> frozenset[str]:
    """Check and return the names of the stores to leave open.

    Args:
        where: name of the list in an error.

    Raises:
        PolicyError: `policy_invalid`, `asked` is no list of names, or names an unknown store.
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
    """Find the stores of this machine, and decide which of them to cover. Blocking.

    Args:
        root: the workspace; a store around it stays open, because the user asked to work there.
        originals: folders of which a staged root is a copy; the copies of their stores are covered, too.
        writable: paths that the host may change; a store in or around one of them stays open.
        homes: home folders of the user and of the host.
        kept: names of stores that stay open.
        given: values of the host's environment; a store with such a path stays open.
    """
    places: dict[str, bool] = {}
    names: dict[str, None] = {}
    left_open: dict[str, None] = {}
    for name, spots in STORES.items():
        for path in dict.fromkeys(path for spot in spots for path in _paths(spot, homes)):
            try:
                os.lstat(path)
            except (OSError, ValueError):  # The path does not exist, or the variable contains none.
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
    """Return True if a folder contains stores, which a copy would contain, too. Blocking."""
    return any(within(path, os.path.realpath(folder)) for path in cover("", (), (), homes_of(None), ()).places)


def store_of(name: str) -> str | None:
    """Return the first existing path of the store `name`; None if no path exists. Blocking."""
    paths = (path for spot in STORES.get(name, ()) for path in _paths(spot, homes_of(None)))
    return next((path for path in paths if os.path.exists(path)), None)


def homes_of(home: str | None) -> tuple[str, ...]:
    """Return the home folders to search for stores: the host's, and the user's if it is another."""
    return tuple(dict.fromkeys(path for path in (home, os.path.expanduser("~")) if path and path[0] == "/"))


def _paths(spot: str, homes: tuple[str, ...]) -> list[str]:
    """Return the paths of an entry in `STORES`: one in each home folder, or in each folder that its variable names."""
    if not spot.startswith("$"):
        return [os.path.join(home, spot) for home in homes]
    variable, slash, rest = spot[1:].partition("/")
    folders = os.environ.get(variable, "").split(os.pathsep)
    return [folder + slash + rest for folder in folders if folder.startswith("/")]


def outermost(found: Mapping[str, bool]) -> dict[str, bool]:
    """Return the paths that lie in no other folder of `found`.

    Args:
        found: absolute path → True for a folder.
    """
    kept: dict[str, bool] = {}
    folder = None
    for path in sorted(found, key=lambda path: f"{path}/"):
        if folder is None or not below(path, folder):
            kept[path] = found[path]
            folder = path if found[path] else None
    return kept


def within(path: str, folder: str) -> bool:
    """Return True if `path` equals `folder` or lies in it; both are absolute, with links followed."""
    return path == folder or below(path, folder)


def below(path: str, folder: str) -> bool:
    """Return True if `path` lies in `folder`, at any depth; both are absolute, with links followed."""
    return path != folder and path.startswith(folder.rstrip("/") + "/")
