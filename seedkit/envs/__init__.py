"""Text environments: `make(name)` returns one, ready for `panel`, `reset` and `step`."""

from __future__ import annotations

from typing import Any, Literal, overload

from seedkit.envs.base import EnvError, TextEnv, panel_hash, spread
from seedkit.envs.household import Household
from seedkit.envs.search import Search

__all__ = ["EnvError", "Household", "Search", "TextEnv", "make", "panel_hash", "spread"]

_CLASSES = {"household": Household, "search": Search}


@overload
def make(name: Literal["household"], **options: Any) -> Household: ...
@overload
def make(name: Literal["search"], **options: Any) -> Search: ...
@overload
def make(name: str, **options: Any) -> TextEnv: ...
def make(name: str, **options: Any) -> TextEnv:
    """An environment by name: `household` (ALFWorld) or `search` (question answering); options are its class's."""
    if name not in _CLASSES:
        raise EnvError(f"no environment named {name!r}; there is: {', '.join(_CLASSES)}")
    return _CLASSES[name](**options)
