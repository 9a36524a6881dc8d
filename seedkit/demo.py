"""`seedkit demo`: Stage 1, then GRPO and SEED from the same start, evaluated side by side, in a few minutes.

Everything it does is a call that a notebook could make; numbers come with their intervals and their protocol.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from seedkit.analyzer import PolicyAnalyzer, RuleAnalyzer, SkillLibrary
from seedkit.envs import Household, make, spread
from seedkit.evaluate import Row, compare, evaluate, table
from seedkit.io import atomic_write
from seedkit.plots import bars, curves, shifts_html
from seedkit.policy import Policy, load_policy
from seedkit.rescoring import rescore
from seedkit.rollout import collect
from seedkit.train import RunError, Stage1Config, Stage2Config, check, read_run, stage1
from seedkit.types import Shifts, Skill, Trajectory

METHODS = ("grpo", "seed")


def demo(
    folder: Path, *, updates: int = 24, panel: int = 72, episodes: int = 2, taught: int = 384, seed: int = 0
) -> list[Row]:
    """Run the demonstration into `folder` and print its table.

    Args:
        updates: Stage 2 updates for each method.
        panel: tasks of `valid_unseen` to evaluate on, all kinds in equal shares.
        episodes: episodes a task in the evaluation.
        taught: training tasks that Stage 1 learns from, an episode each.
    """
    begin = time.perf_counter()
    check(Stage2Config(updates=updates, seed=seed))
    for name, value in (("panel", panel), ("episodes", episodes), ("taught", taught)):
        if value < 1:
            raise RunError(f"{name} must be at least 1, got {value}")
    folder.mkdir(parents=True, exist_ok=True)
    env, policy = make("household"), load_policy("household-tiny")
    train, held_out = env.panel("train"), spread(env.panel("valid_unseen"), panel)
    print(f"policy household-tiny {policy.version}; {len(train)} training tasks, {len(held_out)} held-out ones")

    print("\nStage 1: the policy plays, a rule annotates, the policy learns to write hindsight skills")
    played = collect(policy, env, spread(train, taught), seed=seed, progress=True)
    probe = collect(policy, env, spread(env.panel("valid_seen"), min(taught, 48)), seed=seed + 1, progress=True)
    before = accuracy(policy, env, probe)
    base = policy.clone()
    losses = stage1(policy, played, RuleAnalyzer().write_skills(played), Stage1Config(seed=seed), progress=True)
    after = accuracy(policy, env, probe)
    print(
        f"  analyzer names the right workflow: {before:.0%} before, {after:.0%} after ({losses[-1]['loss']:.2f} nats)"
    )
    start = folder / "stage1"
    policy.save(start)

    print(f"\nStage 2: {' and '.join(METHODS)} from that start, {updates} updates each, side by side")
    train_both(folder, start, updates, seed)

    print(f"\nEvaluation on {len(held_out)} unseen tasks × {episodes} episodes, temperature 0.4")
    measure = {"episodes": episodes, "seed": seed, "progress": True}
    results = [evaluate(base, env, held_out, name="base", **measure)]
    advice = SkillLibrary().write_for(held_out)
    results.append(evaluate(base, env, held_out, name="base + skill in prompt", skills=advice, **measure))
    for name in METHODS:
        trained = load_policy(folder / name / "checkpoints" / "last")
        results.append(evaluate(trained, env, held_out, name=name, **measure))
    rows = compare(results, baseline="base")
    print("\n" + table(rows))

    stories = probe[:4]
    skills = PolicyAnalyzer(policy).write_skills(stories)
    report = write_report(
        folder, rows, policy, stories, skills, rescore(policy, stories, skills), results[0].protocol
    )
    print(f"\n{time.perf_counter() - begin:.0f} s; figures and token-level shifts: {report}")
    return rows


def accuracy(policy: Policy, env: Household, trajectories: list[Trajectory]) -> float:
    """Share of trajectories on which the policy's own analysis names the workflow that the task needs."""
    skills = PolicyAnalyzer(policy).write_skills(trajectories)
    return sum(env.names_workflow(t.task, s) for t, s in zip(trajectories, skills, strict=True)) / len(skills)


def train_both(folder: Path, start: Path, updates: int, seed: int) -> None:
    """Train the methods in one process a core; their runs lie in `folder`."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "seedkit.cli", "train", "--policy", str(start), "--updates", str(updates)]
    command += ["--seed", str(seed), "--tasks", "4", "--lr", "3e-4", "--validation", "0", "--resume"]
    jobs = {
        name: subprocess.Popen([*command, "--method", name, "--run", str(folder / name)], env=environ)
        for name in METHODS
    }
    try:
        failed = [name for name, job in jobs.items() if job.wait() != 0]
    finally:
        for job in jobs.values():
            job.terminate()
    if failed:
        raise RunError(f"training failed: {', '.join(failed)} (see the messages above)")


def write_report(
    folder: Path,
    rows: list[Row],
    policy: Policy,
    trajectories: list[Trajectory],
    skills: list[Skill],
    shifts: list[Shifts],
    protocol: dict,
) -> Path:
    """One HTML page that opens from disk without a network."""
    runs = {name: read_run(folder / name)[1] for name in METHODS}
    figures = [
        bars(rows, "success on unseen tasks, 95 % intervals"),
        curves(runs, "success", "success of the training episodes", "share"),
        curves(runs, "abs_shift", "mean |Δ| of supervised tokens", "nats"),
        curves(runs, "entropy", "entropy of the policy", "nats"),
        curves(runs, "skill_accuracy", "skills that name the right workflow", "share"),
    ]
    parts = [f.to_html(full_html=False, include_plotlyjs=n == 0) for n, f in enumerate(figures)]
    parts += [
        f"<section>{shifts_html(policy, t, s, k)}</section>"
        for t, s, k in zip(trajectories, shifts, skills, strict=True)
    ]
    page = (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>seedkit demo</title><style>"
        "body{font:15px system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem;color:#222}"
        "pre{overflow-x:auto;font-size:12px}section{border-top:1px solid #ccc;padding:1rem 0}</style>"
        f"<h1>seedkit demo</h1><pre>{html.escape(table(rows))}</pre>"
        f"<p>Protocol: <code>{html.escape(json.dumps(protocol))}</code></p>{''.join(parts[: len(figures)])}"
        "<h2>What a hindsight skill does to the sampled tokens</h2><p>Orange tokens become more likely when the "
        "policy's own hindsight skill stands in the context, blue ones less (full colour at 2 nats; hover for "
        f"Δ).</p>{''.join(parts[len(figures) :])}</html>"
    )
    atomic_write(folder / "report.html", page)
    return folder / "report.html"
