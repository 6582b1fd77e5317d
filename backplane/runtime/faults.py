"""Finds faults in a configuration, an order or a policy for which every run would be refused.

The checks are the functions that a run itself calls; they start nothing and ask no model service.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping

from backplane.config import HookSettings, Settings, tighter
from backplane.contract.canonical import Json
from backplane.contract.unknown import check_settings, read_work_order
from backplane.contract.work import REPLAY, WorkOrder, settings_of
from backplane.errors import BackplaneError, ConfigError
from backplane.policy.rules import compile_policy
from backplane.runtime import backends, hooks
from backplane.runtime.orders import check_order, read_policy
from backplane.runtime.state import signer_of
from backplane.sandbox.credentials import read_names
from backplane.sandbox.demands import read_demands
from backplane.upstream.cost import read_price


def check_whole(order: WorkOrder) -> None:
    """Refuse an order that would be refused with every backend.

    Raises:
        ConfigError: `config_invalid`, a member or setting is wrong, or the order selects files and works in place.
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
    """Check an order, given as JSON that fits its schema, as `check_whole` does. Raises as `check_whole`."""
    check_whole(read_work_order(value, lenient=True))


def setting_faults(settings: Settings, environ: Mapping[str, str]) -> Iterator[tuple[str, BackplaneError]]:
    """Yield the settings that runs would refuse, as JSON pointer and error; `option_faults` does so for backends."""
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
        if error.code == "backend_not_found":  # Other errors are reported as that backend's.
            raise


def require_program(program: str, environ: Mapping[str, str], hint: str) -> None:
    """Refuse a hook whose program is missing; because of it, a run would deny every tool.

    Raises:
        ConfigError: `config_invalid`, the program is not found or not executable.
    """
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise ConfigError("config_invalid", f"the program {program!r} is not found or not executable", hint=hint)
