"""Text environments: `make(name)` returns one, ready for `panel`, `reset` and `step`."""

from __future__ import annotations

from typing import Any

from seedkit.envs.base import EnvError, TextEnv, panel_hash, spread
from seedkit.envs.household import Household

__all__ = ["EnvError", "Household", "TextEnv", "make", "panel_hash", "spread"]


def make(name: str, **options: Any) -> Household:
    """An environment by name; only `household` (ALFWorld) is here so far."""
    if name != "household":
        raise EnvError(f"no environment named {name!r}; there is: household")
    return Household(**options)
