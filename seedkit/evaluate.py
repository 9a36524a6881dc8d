"""Evaluation on fixed, hashed task panels, and tables that refuse to mix protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seedkit.envs.base import TextEnv, panel_hash
from seedkit.policy import Policy
from seedkit.rollout import collect
from seedkit.stats import Difference, Interval, bootstrap_interval, paired_difference
from seedkit.types import Skill, Task, digest


class ProtocolError(ValueError):
    """Results that were not measured alike; names the fields that differ."""


@dataclass(frozen=True)
class Result:
    """Successes of one policy on a panel: `successes[e][t]` is 1.0 if episode e of task t succeeded."""

    name: str
    successes: tuple[tuple[float, ...], ...]
    kinds: tuple[str, ...]
    protocol: dict[str, Any]
    steps: float
    response_tokens: float

    @property
    def interval(self) -> Interval:
        """Mean success with a 95 % bootstrap interval over tasks."""
        return bootstrap_interval(np.array(self.successes))

    @property
    def by_kind(self) -> dict[str, float]:
        """Mean success a task kind."""
        tasks = np.array(self.successes).mean(0)
        return {kind: float(tasks[np.array(self.kinds) == kind].mean()) for kind in sorted(set(self.kinds))}


def evaluate(
    policy: Policy,
    env: TextEnv,
    tasks: Sequence[Task],
    *,
    name: str | None = None,
    episodes: int = 1,
    temperature: float = 0.4,
    seed: int = 0,
    max_steps: int = 20,
    skills: Sequence[Skill | None] | None = None,
    progress: bool = False,
) -> Result:
    """Play every task `episodes` times and record who succeeded.

    Args:
        temperature: of sampling (the papers validate at 0.4).
        skills: one a task, to measure prompting; None for none.

    Returns:
        A `Result` with the panel's hash and everything else that decides the number in its protocol.
    """
    if not tasks:
        raise ValueError("no tasks to evaluate on")
    trajectories = collect(
        policy,
        env,
        tasks,
        group=episodes,
        temperature=temperature,
        seed=seed,
        max_steps=max_steps,
        skills=skills,
        progress=progress,
    )
    prompts = [t.skill.id if t.skill else None for t in trajectories]
    protocol = {
        "panel": panel_hash(list(tasks)),
        "tasks": len(tasks),
        "episodes": episodes,
        "seed": seed,
        "temperature": temperature,
        "max_steps": max_steps,
        "context": trajectories[0].protocol["context"],
        "grammar": sorted({t.protocol["grammar"] for t in trajectories}),
        "prompted": digest(prompts) if any(prompts) else None,
    }
    success = np.array([float(t.success) for t in trajectories]).reshape(len(tasks), episodes).T
    return Result(
        name or policy.name,
        tuple(map(tuple, success.tolist())),
        tuple(t.kind for t in tasks),
        protocol,
        float(np.mean([len(t.turns) for t in trajectories])),
        float(np.mean([len(t.response_ids) for t in trajectories])),
    )


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a result, and its paired difference to the baseline (None for the baseline)."""

    name: str
    success: Interval
    difference: Difference | None
    by_kind: dict[str, float]
    steps: float


def compare(results: Sequence[Result], *, baseline: str) -> list[Row]:
    """Rows with intervals, each paired task by task with the baseline.

    Raises:
        ProtocolError: when protocols differ in anything but the prompt's skill; the fields are named.
        ValueError: when the baseline is not among the results.
    """
    by_name = {r.name: r for r in results}
    if baseline not in by_name:
        raise ValueError(f"no result named {baseline!r}; there are {', '.join(by_name)}")
    if len(by_name) != len(results):
        raise ValueError("two results have the same name")
    base = by_name[baseline]
    rows = []
    for result in results:
        keys = (set(base.protocol) | set(result.protocol)) - {"prompted"}
        differing = sorted(k for k in keys if base.protocol.get(k) != result.protocol.get(k))
        if differing:
            raise ProtocolError(
                f"{result.name} and {baseline} were not measured alike: {', '.join(differing)} differ"
            )
        other = None
        if result is not base:
            other = paired_difference(np.array(result.successes), np.array(base.successes))
        rows.append(Row(result.name, result.interval, other, result.by_kind, result.steps))
    return rows


def table(rows: Sequence[Row]) -> str:
    """A comparison as plain text, in percent."""
    kinds = sorted({k for row in rows for k in row.by_kind})
    head = f"{'':26} {'success [95 %]':>20} {'vs baseline [95 %]':>24} {'steps':>6}  " + " ".join(
        f"{k:>5}" for k in kinds
    )
    lines = [head]
    for row in rows:
        s, d = row.success, row.difference
        gap = f"{100 * d.mean:+6.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]" if d else "–"
        lines.append(
            f"{row.name:26} {100 * s.mean:6.1f} [{100 * s.low:.1f}, {100 * s.high:.1f}]".ljust(48)
            + f"{gap:>24} {row.steps:6.1f}  "
            + " ".join(f"{100 * row.by_kind.get(k, float('nan')):5.0f}" for k in kinds)
        )
    return "\n".join(lines)
