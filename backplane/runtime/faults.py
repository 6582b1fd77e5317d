"""What every run would refuse a configuration, an order or a policy for, found before there is a run.

Each is found by the function that the run itself calls; nothing is started, and no model service is asked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping

from backplane.config import HookSettings, Settings, tighter
from backplane.contract.canonical import Json
from backplane.contract.unheard import check_settings, read_work_order
from backplane.contract.work import REPLAY, WorkOrder, settings_of
from backplane.errors import BackplaneError, ConfigError
from backplane.policy.rules import compile_policy
from backplane.runtime import backends, hooks
from backplane.runtime.orders import check_order, read_policy
from backplane.runtime.plane import signer_of
from backplane.sandbox.credentials import read_names
from backplane.sandbox.demands import read_demands
from backplane.upstream.cost import read_price


def check_whole(order: WorkOrder) -> None:
    """Refuse an order that no run would begin with, whatever its backend.

    Raises:
        ConfigError: `config_invalid`, a member or setting is wrong, or in place it selects files.
        PolicyError: `policy_invalid`, a setting is misspelt or the policy cannot be used.
    """
    check_order(order)
    check_settings(order)
    compile_policy(order.policy)
    settings = settings_of(order.config.vendor)
    tighter("off", settings.get("isolation"))
    read_demands(settings.get("enforcement"), order.policy, "off")
    read_names(settings.get("credentials"), "config.vendor.abp.credentials")


def check_read(value: Json) -> None:
    """Refuse an order as JSON that fits its schema; raises as `check_whole`."""
    check_whole(read_work_order(value, lenient=True))


def setting_faults(settings: Settings, environ: Mapping[str, str]) -> Iterator[tuple[str, BackplaneError]]:
    """Yield what runs would refuse settings for, by JSON pointer; the options of backends aside (`option_faults`)."""
    found: list[tuple[str, BackplaneError | None]] = [
        ("/default_backend", _fault(_check_default, settings, environ)),
        ("/signing_key", _fault(signer_of, settings.signing_key)),
    ]
    if settings.policy is not None:
        found.append(("/policy", _fault(lambda policy: compile_policy(read_policy(policy)), settings.policy)))
    found += [(f"/hooks/{number}", _fault(_check_hook, row, environ)) for number, row in enumerate(settings.hooks)]
    prices = {("backends", name, "options"): one.options.get("prices") for name, one in settings.backends.items()}
    prices |= {("routing", "models", name): one.prices for name, one in settings.routing.models.items()}
    found += [
        (f"/{'/'.join(place)}/prices", _fault(read_price, value, f"{'.'.join(place)}.prices"))
        for place, value in prices.items()
        if value is not None
    ]
    yield from ((place, fault) for place, fault in found if fault is not None)


def _fault(check: Callable[..., object], *given: object) -> BackplaneError | None:
    try:
        check(*given)
    except BackplaneError as error:
        return error
    return None


def _check_hook(row: HookSettings, environ: Mapping[str, str]) -> None:
    for hook in hooks.configured((row,)):
        if isinstance(hook.run, tuple):
            require_program(hook.run[0], environ, "correct its command")


def _check_default(settings: Settings, environ: Mapping[str, str]) -> None:
    name = settings.default_backend
    if name is None or name.startswith(REPLAY):
        return
    try:
        backends.find(name, settings, environ)
    except BackplaneError as error:
        if error.code == "backend_not_found":  # Anything else is its own backend's finding.
            raise


def require_program(program: str, environ: Mapping[str, str], hint: str) -> None:
    """Refuse a hook's program that is not there: the run would deny every tool, and say so again and again.

    Raises:
        ConfigError: `config_invalid`.
    """
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise ConfigError("config_invalid", f"the program {program!r} is not found or not executable", hint=hint)
