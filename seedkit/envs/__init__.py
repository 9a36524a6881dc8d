"""Text environments: `make(name)` returns one, ready for `panel`, `reset` and `step`."""

from __future__ import annotations

from typing import Any

from seedkit.envs.base import EnvError, TextEnv, panel_hash, spread
from seedkit.envs.household import Household
from seedkit.envs.webshop import WebShop

__all__ = ["EnvError", "Household", "TextEnv", "WebShop", "make", "panel_hash", "spread"]

ENVIRONMENTS = {env.name: env for env in (Household, WebShop)}


def make(name: str, **options: Any) -> Any:
    """An environment by name: `household` (ALFWorld) or `webshop`."""
    if name not in ENVIRONMENTS:
        raise EnvError(f"no environment named {name!r}; there are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name](**options)
