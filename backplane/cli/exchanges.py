"""Finds the exchange of the gateway that a command's word RUN names, if it names no run."""

from __future__ import annotations

import os

from backplane import config
from backplane.errors import ConfigError
from backplane.gateway.journal import beginning
from backplane.gateway.record import RecordedExchange
from backplane.receipts.memory import Remembered, find
from backplane.receipts.store import Store, only


def find_either(store: Store, name: str) -> Remembered | RecordedExchange:
    """Find a run, as `find` does; if there is none, the exchange whose id begins so.

    Raises:
        ConfigError: `config_invalid`: the name is too short, names nothing, or several.
        StoreError: `receipt_store_failed`.
    """
    try:
        return find(store, name)
    except ConfigError:
        found = beginning(config.home_path(os.environ), name)
        if not found:
            raise
        only(name, [one.id for one in found], "exchanges")
        return found[0]
