"""What the kit asks of a text environment, and the hashed task panels that comparisons stand on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

from seedkit.types import Observation, Skill, Task, digest


class EnvError(ValueError):
    """A task, panel or data folder that cannot be used; the message says what would be right."""


@runtime_checkable
class TextEnv(Protocol):
    """One episode at a time; `clone` gives another player on the same loaded games."""

    name: str
    engine_name: str
    max_steps: int
    """Most turns of an episode."""
    max_action_tokens: int
    """Longest action that a policy gets to write, in tokens; more where an action on offer is longer in its own."""

    def panel(self, split: str) -> list[Task]:
        """The split's tasks in their fixed order."""
        ...

    def reset(self, task: Task) -> Observation:
        """Start a task."""
        ...

    def step(self, action: str) -> Observation:
        """Send one action. An action that is not admissible changes nothing ("Nothing happens.").

        Where any text may be sent (`admissible` is None), the observation's `reason` says why the action is invalid.
        """
        ...

    def clone(self) -> TextEnv:
        """An independent player that shares games and known transitions."""
        ...

    def close(self) -> None:
        """Give back what the player holds."""
        ...

    def grammar(self, task: Task) -> str:
        """Which wording of the environment's text a task uses; part of every protocol."""
        ...

    def names_workflow(self, task: Task, skill: Skill) -> bool:
        """Whether a skill spells out what the task's kind needs."""
        ...


def data_dir() -> Path:
    """The repository's `data/` folder (or SEEDKIT_DATA)."""
    return Path(os.environ.get("SEEDKIT_DATA") or Path(__file__).resolve().parents[2] / "data")


def cache_dir() -> Path:
    """Where things that can be rebuilt are kept (SEEDKIT_CACHE, or the user's cache folder)."""
    base = os.environ.get("SEEDKIT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "seedkit"
    path = Path(base).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def panel_hash(tasks: list[Task]) -> str:
    """Identifies a panel by its sorted tasks, whatever order they are listed in."""
    return digest(sorted([t.id, t.env, t.kind, json.dumps(t.spec, sort_keys=True)] for t in tasks))


def read_panel(path: Path, env: str) -> list[Task]:
    """Read a panel file: a first line with split, count and hash, then one task a line.

    Raises:
        EnvError: naming file, line and field when anything is missing, malformed or not what the hash says.
    """
    if not path.exists():
        raise EnvError(f"{path}: no such panel file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise EnvError(f"{path.name}: not UTF-8 text ({error.reason})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EnvError(f"{path.name} line {number}: not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise EnvError(f"{path.name} line {number}: expected an object, got {type(row).__name__}")
        rows.append(row)
    if not rows or not {"split", "count", "hash"} <= set(rows[0]):
        raise EnvError(f"{path.name} line 1: expected the panel's header with split, count and hash")
    if rows[0]["split"] != path.stem:
        raise EnvError(f"{path.name} line 1: the split is {rows[0]['split']!r}, the file's name says {path.stem!r}")
    header, tasks = rows[0], []
    for number, row in enumerate(rows[1:], 2):
        for key, kind in (("id", str), ("kind", str), ("spec", dict)):
            if not isinstance(row.get(key), kind):
                raise EnvError(f"{path.name} line {number}: field {key!r} must be a {kind.__name__}")
        tasks.append(Task(row["id"], env, header["split"], row["kind"], row["spec"]))
    if len(tasks) != header["count"]:
        raise EnvError(f"{path.name}: the header promises {header['count']} tasks, the file holds {len(tasks)}")
    if len({t.id for t in tasks}) != len(tasks):
        raise EnvError(f"{path.name}: a task id occurs twice")
    if panel_hash(tasks) != header["hash"]:
        raise EnvError(f"{path.name}: tasks do not match the header's hash {header['hash']}; restore the file")
    return sorted(tasks, key=lambda t: t.id)


def write_panel(path: Path, split: str, tasks: list[Task]) -> None:
    """Write a panel file that `read_panel` accepts."""
    tasks = sorted(tasks, key=lambda t: t.id)
    rows = [{"split": split, "count": len(tasks), "hash": panel_hash(tasks)}]
    rows += [{"id": t.id, "kind": t.kind, "spec": t.spec} for t in tasks]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows), encoding="utf-8")


def spread(tasks: list[Task], count: int) -> list[Task]:
    """The first `count` tasks of a panel taken in turn over its kinds, so that a part keeps the panel's mix."""
    if count < 0:
        raise EnvError(f"cannot take {count} tasks of a panel")
    by_kind: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda t: (digest(t.id), t.id)):
        by_kind.setdefault(task.kind, []).append(task)
    order = [
        tasks[n]
        for n in range(max(map(len, by_kind.values()), default=0))
        for _, tasks in sorted(by_kind.items())
        if n < len(tasks)
    ]
    return order[:count]
