"""The version of the contract, which a hello and every receipt name."""

from __future__ import annotations

from typing import Final

CONTRACT_VERSION: Final = "abp/v0.1"
