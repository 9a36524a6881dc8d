"""Text environments: `make(name)` returns one, ready for `panel`, `reset` and `step`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

from seedkit.envs.base import EnvError, TextEnv, data_dir, panel_hash, spread

if TYPE_CHECKING:
    from seedkit.envs.household import Household
    from seedkit.envs.search import Search
    from seedkit.envs.sokoban import Sokoban
    from seedkit.envs.webshop import WebShop

__all__ = [
    "DEFAULT",
    "NAMES",
    "EnvError",
    "Household",
    "Search",
    "Sokoban",
    "TextEnv",
    "WebShop",
    "advice",
    "build_policy",
    "make",
    "panel_hash",
    "places",
    "report",
    "shipped_policy",
    "spread",
    "verbs",
]

DEFAULT = "household"
"""The environment that a command plays where none is named."""
NAMES = ("household", "search", "webshop", "sokoban")
# Modules and their classes, imported when asked for: an engine like TextWorld's takes seconds.
_CLASSES = dict(zip(NAMES, ("Household", "Search", "WebShop", "Sokoban"), strict=True))


@overload
def make(name: Literal["household"], **options: Any) -> Household: ...
@overload
def make(name: Literal["search"], **options: Any) -> Search: ...
@overload
def make(name: Literal["webshop"], **options: Any) -> WebShop: ...
@overload
def make(name: Literal["sokoban"], **options: Any) -> Sokoban: ...
@overload
def make(name: str, **options: Any) -> TextEnv: ...
def make(name: str, **options: Any) -> TextEnv:
    """An environment by name: `household` (ALFWorld), `search` (question answering), `webshop` or `sokoban`.

    One of your own is `module:Class`, for a module that Python finds.
    """
    if name in _CLASSES:
        return __getattr__(_CLASSES[name])(**options)
    module, colon, found = name.partition(":")
    if not colon:
        raise EnvError(f"no environment named {name!r}; there are {', '.join(NAMES)}, and module:Class of your own")
    try:
        player = getattr(import_module(module), found)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvError(f"environment {name!r}: {error}; it should be module:Class") from error
    return player(**options)


def advice(name: str) -> ModuleType:
    """What is known of skills in an environment: a module with `hindsight(trajectory) -> str` and `PLACEBOS`.

    For one that is not ours it is the default's, which reads foreign rollouts of the same game and refuses others.
    """
    return import_module(f"{__name__}.{name if name in _CLASSES else DEFAULT}_skills")


def places(name: str) -> frozenset[str]:
    """Words, in lower case, that name places in an environment's commands; the inspector tells them from objects."""
    return getattr(advice(name), "places", frozenset)()


def verbs(name: str) -> bool:
    """Whether an environment's commands begin with a verb; in `search` the tags around the words say what to do."""
    return getattr(advice(name), "VERBS", True)


def report(name: str) -> dict[str, Callable[[], str]]:
    """What `seedkit doctor` tells of an environment beside its panels: a label, and what finds it out or raises."""
    return getattr(import_module(f"{__name__}.{name}"), "REPORT", {})


def shipped_policy(name: str) -> str:
    """The policy that comes with the kit for an environment: `NAME-tiny` in data/policies.

    Raises:
        EnvError: where there is none, with the environments that have one.
    """
    folder = data_dir() / "policies"
    if not (folder / f"{name}-tiny").is_dir():
        having = [known for known in NAMES if (folder / f"{known}-tiny").is_dir()]
        raise EnvError(f"no policy comes with the environment {name!r}; one does with {', '.join(having) or 'none'}")
    return f"{name}-tiny"


def build_policy(name: str, out: Path) -> None:
    """Train an environment's policy from scratch and write it to `out`.

    Raises:
        EnvError: where nothing is known of how, with the environments that have a recipe.
    """
    recipes = [known for known in NAMES if (Path(__file__).parent / f"{known}_policy.py").exists()]
    if name not in recipes:
        raise EnvError(f"no recipe for a policy of the environment {name!r}; there is one for {', '.join(recipes)}")
    from seedkit.envs import tiny

    tiny.build_policy(name, out)


def __getattr__(name: str) -> Any:
    for module, found in _CLASSES.items():
        if found == name:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
