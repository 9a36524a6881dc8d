"""Evaluation on fixed, hashed task panels, and tables that refuse to mix protocols.

A comparison may hold one result a name, or several of different seeds: runs of one method. Runs are paired by seed,
tasks by place in the panel. Leaves out training; `experiment` runs whole comparisons.
"""

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
    """Successes of one policy on a panel: `successes[e][t]` is 1.0 if episode e of task t succeeded.

    `protocol["seed"]` is the run's: results of one name and several seeds are runs of one method.
    """

    name: str
    successes: tuple[tuple[float, ...], ...]
    kinds: tuple[str, ...]
    protocol: dict[str, Any]
    steps: float
    response_tokens: float

    @property
    def by_task(self) -> np.ndarray:
        """Mean success of each task over its episodes [tasks]."""
        return np.array(self.successes).mean(0)

    @property
    def interval(self) -> Interval:
        """Mean success with a 95 % bootstrap interval over tasks."""
        return bootstrap_interval(self.by_task)

    @property
    def by_kind(self) -> dict[str, float]:
        """Mean success a task kind."""
        kinds = np.array(self.kinds)
        return {kind: float(self.by_task[kinds == kind].mean()) for kind in sorted(set(self.kinds))}


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
    max_new_tokens: int | None = None,
    skills: Sequence[Skill | None] | None = None,
    progress: bool = False,
) -> Result:
    """Play every task `episodes` times and record who succeeded.

    Args:
        temperature: of sampling (the papers validate at 0.4).
        max_new_tokens: longest answer; None as in `collect`.
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
        max_new_tokens=max_new_tokens,
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
    """One line of a comparison: a name's results, and their paired difference to the baseline (None for itself)."""

    name: str
    runs: int
    success: Interval
    difference: Difference | None
    by_kind: dict[str, float]
    steps: float


def compare(results: Sequence[Result], *, baseline: str) -> list[Row]:
    """Rows with 95 % intervals, each paired task by task and seed by seed with the baseline.

    Where a name has seeds that the baseline lacks, its difference is that of the seeds they share.

    Raises:
        ProtocolError: when protocols differ in anything but seed and prompt; the fields are named.
        ValueError: when the baseline is not among the results, or a name has two results of one seed.
    """
    names: dict[str, dict[Any, Result]] = {}
    for result in results:
        runs = names.setdefault(result.name, {})
        if runs.setdefault(result.protocol.get("seed"), result) is not result:
            raise ValueError(f"two results have the same name and seed: {result.name}")
    if baseline not in names:
        raise ValueError(f"no result named {baseline!r}; there are {', '.join(names)}")
    base = names[baseline]
    expected = next(iter(base.values())).protocol
    rows = []
    for name, runs in names.items():
        for result in runs.values():
            if differ := differing(result.protocol, expected):
                raise ProtocolError(f"{name} and {baseline} were not measured alike: {', '.join(differ)} differ")
        shared = sorted(runs.keys() & base.keys(), key=str)
        if not shared:
            raise ProtocolError(f"{name} and {baseline} were not measured alike: seed differs, so nothing is paired")
        difference = None
        if name != baseline:
            difference = paired_difference(*(np.array([of[s].by_task for s in shared]) for of in (runs, base)))
        ordered = [runs[seed] for seed in sorted(runs, key=str)]
        success = bootstrap_interval(np.array([r.by_task for r in ordered]))
        by_kind = {kind: float(np.mean([r.by_kind[kind] for r in ordered])) for kind in ordered[0].by_kind}
        steps = float(np.mean([r.steps for r in ordered]))
        rows.append(Row(name, len(runs), success, difference, by_kind, steps))
    return rows


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Fields, by dotted name, in which two protocols differ; seed and prompt, which pair results, left out."""
    a, b = _flat(a), _flat(b)
    return sorted(k for k in (a | b).keys() - {"seed", "prompted"} if a.get(k) != b.get(k))


def _flat(protocol: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in protocol.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


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
