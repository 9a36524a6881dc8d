"""`seedkit demo`: Stage 1, then GRPO and SEED from the same start, evaluated side by side, in a few minutes.

Everything it does is a call that a notebook could make; numbers come with their intervals and their protocol.
"""

from __future__ import annotations

import html
import json
import time
from dataclasses import replace
from pathlib import Path

from seedkit.analyzer import PolicyAnalyzer
from seedkit.envs import DEFAULT, TextEnv, make, shipped_policy, spread
from seedkit.envs.tiny import organism
from seedkit.evaluate import Row, compare, table
from seedkit.experiment import CURVES, Arm, Outcome, Plan, run, teach
from seedkit.io import atomic_write
from seedkit.methods import METHODS
from seedkit.plots import bars, learning_curves, shifts_html
from seedkit.policy import Policy, load_policy
from seedkit.rescoring import rescore
from seedkit.rollout import collect
from seedkit.train import RunError, Stage2Config
from seedkit.types import Shifts, Skill, Trajectory


def demo(
    folder: Path,
    *,
    environment: str = DEFAULT,
    updates: int = 24,
    panel: int = 72,
    episodes: int = 2,
    taught: int = 384,
    seed: int = 0,
) -> list[Row]:
    """Run the demonstration into `folder` and print its table.

    What is finished in `folder` is not done again; a run of other settings there is refused.

    Args:
        environment: one that a policy comes with.
        updates: Stage 2 updates for each method.
        panel: tasks of `valid_unseen` to evaluate on, all kinds in equal shares.
        episodes: episodes a task in the evaluation.
        taught: training tasks that Stage 1 learns from, an episode each.

    Raises:
        EnvError: for an environment without a policy, naming those that have one.
    """
    begin = time.perf_counter()
    for name, value in (("panel", panel), ("taught", taught)):
        if value < 1:
            raise RunError(f"{name} must be at least 1, got {value}")
    env, start = make(environment), shipped_policy(environment)
    base = load_policy(start)
    train, held_out = env.panel("train"), spread(env.panel("valid_unseen"), panel)
    config = Stage2Config(updates=updates, tasks=4, lr=3e-4, seed=seed)
    plan = Plan(folder / "stage1", train, held_out, config=config, episodes=episodes, environment=environment)
    print(f"policy {start} {base.version}; {len(train)} training tasks, {len(held_out)} held-out ones")

    print("\nStage 1: the policy plays, a rule annotates, the policy learns to write hindsight skills")
    probe = collect(base, env, spread(env.panel("valid_seen"), min(taught, 48)), seed=seed + 1, progress=True)
    before = accuracy(base, env, probe)
    settings = replace(organism(environment).stage1, seed=seed)
    teach(folder / "stage1", env, base, spread(train, taught), settings, progress=True)
    policy = load_policy(plan.start)
    print(f"  analyzer names the right workflow: {before:.0%} before, {accuracy(policy, env, probe):.0%} after")

    print(f"\nStage 2: GRPO and SEED from that start, {updates} updates each, side by side; then all four policies")
    print(f"on {len(held_out)} unseen tasks × {episodes} episodes, temperature {plan.temperature}")
    arms = (
        Arm("base", start=start),
        Arm("base + skill in prompt", start=start, prompted=True),
        Arm("grpo", METHODS["grpo"]),
        Arm("seed", METHODS["seed"]),
    )
    outcomes = run(arms, [seed], plan, folder, progress=True)
    rows = compare([o.final for o in outcomes], baseline="base")
    print("\n" + table(rows))

    stories = probe[:4]
    skills = PolicyAnalyzer(policy).write_skills(stories)
    report = write_report(folder, rows, outcomes, policy, stories, skills, rescore(policy, stories, skills))
    print(f"\n{time.perf_counter() - begin:.0f} s; figures and token-level shifts: {report}")
    return rows


def accuracy(policy: Policy, env: TextEnv, trajectories: list[Trajectory]) -> float:
    """Share of trajectories on which the policy's own analysis names the workflow that the task needs."""
    skills = PolicyAnalyzer(policy).write_skills(trajectories)
    return sum(env.names_workflow(t.task, s) for t, s in zip(trajectories, skills, strict=True)) / len(skills)


def write_report(
    folder: Path,
    rows: list[Row],
    outcomes: list[Outcome],
    policy: Policy,
    trajectories: list[Trajectory],
    skills: list[Skill],
    shifts: list[Shifts],
) -> Path:
    """One HTML page that opens from disk without a network."""
    figures = [bars(rows, "success on unseen tasks, 95 % intervals")]
    for key in ("success", "abs_shift", "entropy", "skill_accuracy"):
        figures.append(learning_curves(outcomes, key, *CURVES[key]))
    parts = [f.to_html(full_html=False, include_plotlyjs=n == 0) for n, f in enumerate(figures)]
    parts += [
        f"<section>{shifts_html(policy, t, s, k)}</section>"
        for t, s, k in zip(trajectories, shifts, skills, strict=True)
    ]
    protocol = html.escape(json.dumps(outcomes[0].final.protocol))
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>seedkit demo</title><style>"
        "body{font:15px system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem;color:#222}"
        "pre{overflow-x:auto;font-size:12px}section{border-top:1px solid #ccc;padding:1rem 0}</style>"
        f"<h1>seedkit demo</h1><pre>{html.escape(table(rows))}</pre>"
        f"<p>Protocol: <code>{protocol}</code></p>{''.join(parts[: len(figures)])}"
        "<h2>What a hindsight skill does to the sampled tokens</h2><p>Orange tokens become more likely when the "
        "policy's own hindsight skill stands in the context, blue ones less (full colour at 2 nats; hover for "
        f"Δ).</p>{''.join(parts[len(figures) :])}</html>"
    )
    atomic_write(folder / "report.html", page)
    return folder / "report.html"
