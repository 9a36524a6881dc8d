"""Stage 1 (hindsight-skill SFT) and Stage 2 (GRPO with self-distillation), as SEED describes them.

Implements: SFT on trajectory → skill; the loop collect → analyze → rescore → gate → update; a run directory that
survives `kill -9` and resumes to the same numbers. Deviates: one gradient step a batch (on-policy), rewards of 0/1
instead of 0/10 with the invalid-action penalty scaled alike; an anchor in Stage 1. Leaves out: several GPUs
(`seedkit.integrations.trl`).
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from seedkit.analyzer import Analyzer, SkillLibrary, by_name, reasons
from seedkit.envs.base import TextEnv, panel_hash
from seedkit.evaluate import evaluate
from seedkit.gate import gate_weights
from seedkit.io import Ledger, append_jsonl, atomic_write, read_jsonl, read_object, write_ledger, write_trajectories
from seedkit.methods import Method, method_losses, resolve
from seedkit.objective import degenerate_groups, group_advantages, kl_penalty, masked_mean
from seedkit.policy import Policy, Sample, sampled
from seedkit.rescoring import combine, critical, rescore
from seedkit.rollout import collect
from seedkit.types import Shifts, Skill, Task, Trajectory

LEFT_OUT = "a success, left out"
"""Why a successful trajectory has no skill where a method learns from failures only."""


class RunError(ValueError):
    """A run directory or configuration that cannot be used; the message says what would be right."""


@dataclass(frozen=True)
class Stage1Config:
    """Hindsight-skill SFT."""

    epochs: int = 2
    """Passes over the examples (SEED: 3). More episodes taught better than more passes (LOG.md)."""
    lr: float = 1e-3
    """AdamW step size, for a policy of a few million parameters."""
    batch_size: int = 4
    """Trajectories a step."""
    anchor: float = 0.3
    """Weight of staying near the starting policy at the episodes' own moves (not in SEED); 0 leaves it out."""
    seed: int = 0
    """Order of the examples."""


@dataclass(frozen=True)
class Stage2Config:
    """GRPO plus a method's term. Papers' values where they carry over to a tiny policy, else noted."""

    method: str = "seed"
    """A name in `METHODS`."""
    updates: int = 150
    """Gradient steps (SEED, ALFWorld: 150)."""
    tasks: int = 16
    """Training tasks an update (papers: 16)."""
    group: int = 8
    """Episodes a task (papers: 8)."""
    lr: float = 1e-4
    """AdamW step size (papers: 1e-6 for billions of parameters)."""
    coef: float | None = None
    """λ; None takes the method's own (SEED, SDAR: 0.01)."""
    beta: float | None = None
    """β, gate steepness in 1/nat; None takes the method's own (papers: 5)."""
    kl_coef: float = 0.01
    """Weight of the low-variance KL to the starting policy (papers: 0.01); 0 leaves it out."""
    invalid_penalty: float = 0.01
    """Taken off the reward for each invalid action (papers: 0.1 where success pays 10; here it pays 1)."""
    max_steps: int = 20
    """Turns an episode (SEED: 30, on larger rooms)."""
    temperature: float = 1.0
    """Of the rollout (papers: 1)."""
    max_new_tokens: int | None = None
    """Longest response; None for what the environment's actions take. Reasoning needs more (papers: 512)."""
    seed: int = 0
    """Decides tasks and sampling."""


def check(config: Stage1Config | Stage2Config) -> None:
    """Raise `RunError` naming the first field that cannot be right."""
    positive = {
        "epochs",
        "batch_size",
        "updates",
        "tasks",
        "group",
        "max_steps",
        "max_new_tokens",
        "lr",
        "temperature",
    }
    for name, value in asdict(config).items():
        if name == "method":
            resolve(value)
            continue
        if value is None and name in ("coef", "beta", "max_new_tokens"):
            continue
        whole = name in ("epochs", "batch_size", "updates", "tasks", "group", "max_steps", "max_new_tokens", "seed")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise RunError(f"{name} must be a {'whole number' if whole else 'number'}, got {value!r}")
        if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
            raise RunError(f"{name} must be {'positive' if name in positive else 'at least 0'}, got {value!r}")


# --- stage 1 ------------------------------------------------------------------------------------------------------


def stage1(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    skills: Sequence[Skill],
    config: Stage1Config = Stage1Config(),
    *,
    progress: bool = False,
) -> list[dict[str, int | float]]:
    """Fine-tune the policy, in place, to write the given skill after each finished trajectory.

    Trajectories whose skill is not `ok` are left out. Loss: cross-entropy on the analysis tokens, plus anchor · d²/2
    on the moves' tokens, d the log-ratio to the policy as it came in, in the analysis prompt's own context (no skill,
    temperature 1, whatever the episode was played with). Nats a token.

    Returns:
        One row a step: step, epoch, loss (cross-entropy alone), drift (mean d²/2 before the step; also at anchor 0).

    Source: SEED, Stage 1 (180 tasks × 8 rollouts, 3 epochs).
    Deviates: the anchor. Writing and playing share a tiny policy's weights; without it play is unlearnt (LOG.md).
    """
    check(config)
    if len(skills) != len(trajectories):
        raise RunError(f"one skill a trajectory: {len(skills)} for {len(trajectories)}")
    examples, moves, written = [], [], []
    for trajectory, skill in zip(trajectories, skills, strict=True):
        if skill.ok:
            prompt = policy.analysis_ids(trajectory)
            answer = [*policy.encode(json.dumps({"episode_skill": skill.episode})), policy.end_id]
            plain = policy.transcript(trajectory)  # how the prompt begins
            mask = [*plain.mask, *[False] * (len(prompt) - len(plain.ids)), *[True] * len(answer)]
            examples.append(Sample(tuple(prompt + answer), tuple(mask)))
            moves.append(plain)
            written.append(torch.tensor([False] * sum(plain.mask) + [True] * len(answer)))
    if not examples:
        raise RunError("no trajectory has a skill to learn from")
    return _fine_tune(policy, examples, written, policy.token_logprobs(moves), config, "stage 1", progress)


def imitate(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    config: Stage1Config = Stage1Config(),
    *,
    progress: bool = False,
) -> list[dict[str, int | float]]:
    """Fine-tune the policy, in place, to say what was said in these episodes, skills in their prompts included.

    The warm-up that shows a language model how skills are used before it is asked to use its own. Loss: cross-entropy
    on the response tokens, nats a token; `config.anchor` plays no part. Returns rows as `stage1`'s.
    """
    check(config)
    examples = [sample for t in trajectories for sample in policy.samples(t) if any(sample.mask)]
    if not examples:
        raise RunError("no trajectory has a response to learn from")
    written = [torch.ones(sum(s.mask), dtype=torch.bool) for s in examples]
    return _fine_tune(policy, examples, written, [torch.empty(0)] * len(examples), config, "imitation", progress)


def _fine_tune(
    policy: Policy,
    examples: Sequence[Sample],
    written: Sequence[Tensor],
    start_logp: Sequence[Tensor],
    config: Stage1Config,
    title: str,
    progress: bool,
) -> list[dict[str, int | float]]:
    """Cross-entropy on the sampled tokens that are `written`, the anchor on the others."""
    optimizer = torch.optim.AdamW(policy.own().values(), lr=config.lr, weight_decay=0.0)
    steps = config.epochs * math.ceil(len(examples) / config.batch_size)
    rows: list[dict[str, int | float]] = []
    bar = tqdm(total=steps, desc=title, disable=not progress, leave=False)
    for epoch in range(config.epochs):
        order = list(range(len(examples)))
        random.Random(f"{config.seed}-{epoch}").shuffle(order)
        for start in range(0, len(order), config.batch_size):
            batch = order[start : start + config.batch_size]
            for group in optimizer.param_groups:
                group["lr"] = config.lr * (1 - len(rows) / steps)
            answers = sum(int(written[i].sum()) for i in batch)
            played = max(sum(int((~written[i]).sum()) for i in batch), 1)
            total = drift = 0.0
            for pack in policy.batches([examples[i] for i in batch], training=True):
                part = [batch[n] for n in pack]
                logp, _ = policy.logprobs(*policy.pad([examples[i] for i in part]))
                wrote = torch.cat([written[i] for i in part])
                base = torch.cat([start_logp[i] for i in part])[None]
                everywhere = torch.ones_like(base, dtype=torch.bool)
                loss = -logp[wrote].sum() / answers
                away = kl_penalty(logp[~wrote][None], base, everywhere, kind="squared").sum() / played
                (loss + config.anchor * away).backward()
                total += float(loss.detach())
                drift += float(away.detach())
            _step(policy, optimizer)
            rows.append({"step": len(rows), "epoch": epoch, "loss": total, "drift": drift})
            bar.set_postfix(loss=f"{total:.3f}", drift=f"{drift:.3f}")
            bar.update()
    bar.close()
    return rows


def _step(policy: Policy, optimizer: torch.optim.Optimizer, clip: float = 1.0) -> float:
    """Clip, update, clear; returns the gradient norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(policy.own().values(), clip)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


# --- stage 2 ------------------------------------------------------------------------------------------------------


def stage2(
    policy: Policy,
    env: TextEnv,
    tasks: Sequence[Task],
    config: Stage2Config = Stage2Config(),
    *,
    method: Method | None = None,
    analyzer: Analyzer | Sequence[Analyzer] | None = None,
    run: Path | str | None = None,
    resume: bool = False,
    validation: Sequence[Task] = (),
    eval_every: int = 10,
    save_every: int = 10,
    progress: bool = False,
    on_update: Callable[[dict[str, Any], list[Trajectory], list[Shifts]], None] | None = None,
) -> list[dict[str, Any]]:
    """Train the policy, in place.

    Args:
        tasks: training tasks; every update takes `config.tasks` of them, without repeats until all were used.
        method: a `Method` of your own instead of the one that `config.method` names.
        analyzer: who writes the skills; None takes the method's: the policy itself, the committed library, or both.
            Several are several teachers, made one as `method.combine` says.
        run: directory for protocol, metrics, trajectories and checkpoints; None keeps nothing.
        resume: go on from the run's last complete update; the numbers are those of an uninterrupted run. Give the
            policy that the run began with.
        validation: tasks to evaluate on every `eval_every` updates (temperature 0.4); they choose the best
            checkpoint.
        save_every: how often trajectories and a numbered checkpoint are kept.
        on_update: called after each update with metrics, trajectories and shifts.

    Returns:
        The metrics, a row an update (glossary in README). Keys that begin with `seconds_` are wall-clock times
        and differ from run to run; all others are reproducible.
    """
    check(config)
    if not tasks:
        raise RunError("no training tasks")
    for name, value in (("eval_every", eval_every), ("save_every", save_every)):
        if value < 1:
            raise RunError(f"{name} must be at least 1, got {value}")
    chosen = resolve(method or config.method, beta=config.beta, coef=config.coef)
    analyzers = _analyzers(policy, chosen, analyzer)
    optimizer = torch.optim.AdamW(policy.own().values(), lr=config.lr, weight_decay=0.0)
    keeper = _Run(run, policy, env, tasks, config, chosen, analyzers, validation, resume) if run is not None else None
    reference = keeper.reference(policy) if keeper else policy.clone()
    decay = chosen.teacher_decay
    teacher = policy if decay == 0 else reference if decay == 1 else reference.clone()
    rows = keeper.restore(policy, optimizer, teacher) if keeper else []
    bar = tqdm(total=config.updates, initial=len(rows), desc=chosen.name, disable=not progress, leave=False)
    while len(rows) < config.updates:
        update, lap = len(rows), _Laps()
        now = chosen.at(update + 1)
        batch = batch_tasks(tasks, config, update)
        prompts = SkillLibrary().write_for(batch) if chosen.skill_in_prompt else None
        trajectories = collect(
            policy,
            env,
            batch,
            group=config.group,
            temperature=config.temperature,
            seed=config.seed * 100_003 + update,
            max_steps=config.max_steps,
            skills=prompts,
            max_new_tokens=config.max_new_tokens,
        )
        lap("rollout")

        skills: list[Skill] = [Skill(reason="not asked for")] * len(trajectories)
        shifts: list[Shifts] = []
        if now.needs_teacher:
            written = [_write(one, trajectories, now) for one in analyzers]
            skills = written[0]
            lap("analysis")
            behaviour = [t.behaviour_logp for t in trajectories]  # these very weights sampled them
            known = {"teacher": teacher, "student_logp": behaviour, "critical_first": now.step_scale is not None}
            shifts = combine([rescore(policy, trajectories, w, **known) for w in written], now.combine)
            lap("rescoring")

        row: dict[str, Any] = {"update": update + 1}
        sums, ledger = _update(policy, teacher, reference, optimizer, trajectories, skills, shifts, now, config)
        if 0 < decay < 1:
            _follow(teacher, policy, decay)
        row |= sums
        row |= _skill_metrics(env, trajectories, skills, shifts, now)
        lap("update")

        if validation and ((update + 1) % eval_every == 0 or update + 1 == config.updates):
            lengths = {"max_steps": config.max_steps, "max_new_tokens": config.max_new_tokens}
            result = evaluate(policy, env, validation, seed=config.seed, **lengths)
            row["validation_success"] = result.interval.mean
            lap("validation")
        row["alarms"] = alarms(row, rows)
        for alarm in row["alarms"]:
            tqdm.write(f"update {update + 1}: {alarm}")
        rows.append(row | lap.seconds)
        if keeper:
            keeper.save(policy, optimizer, teacher, rows, trajectories, skills, shifts, ledger, save_every)
        if on_update:
            on_update(rows[-1], trajectories, shifts)
        shown = {"success": f"{row['success']:.2f}", "reward": f"{row['reward']:.2f}"}
        shown |= {"|Δ|": f"{row['abs_shift']:.3f}"} if shifts else {}
        bar.set_postfix(shown | {k[8:]: f"{v:.1f}s" for k, v in lap.seconds.items()})
        bar.update()
    bar.close()
    return rows


def _analyzers(policy: Policy, method: Method, given: Analyzer | Sequence[Analyzer] | None) -> list[Analyzer]:
    """Who writes the skills of a method; nobody where it has no teacher."""
    if not method.needs_teacher:
        return []
    if given is None:
        names = {"none": (), "both": ("self", "library")}.get(method.skills, (method.skills,))
        given = [by_name(name, policy) for name in names]
    analyzers = list(given) if isinstance(given, Sequence) else [given]
    if not analyzers:
        raise RunError(f"{method.name} has a teacher but says not where its skills come from: give an analyzer")
    if len(analyzers) > 1 and (method.whole or method.step_scale is not None):
        raise RunError(f"{method.name} takes one skill a trajectory, not {len(analyzers)}")
    return analyzers


def _write(analyzer: Analyzer, trajectories: Sequence[Trajectory], method: Method) -> list[Skill]:
    skills = analyzer.write_skills(trajectories)
    if not method.failed_only:
        return skills
    return [Skill(reason=LEFT_OUT) if t.success else s for t, s in zip(trajectories, skills, strict=True)]


@torch.no_grad()
def _follow(teacher: Policy, policy: Policy, decay: float) -> None:
    """Exponential moving average: the teacher keeps a share of its weights and takes the rest from the policy."""
    for kept, new in zip(teacher.own().values(), policy.own().values(), strict=True):
        kept.lerp_(new, 1 - decay)


class _Laps:
    """Seconds an update spends in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds_{phase}"], self._clock = now - self._clock, now


def batch_tasks(tasks: Sequence[Task], config: Stage2Config, update: int) -> list[Task]:
    """The tasks of an update: consecutive pieces of seeded permutations, the same for every method."""
    batch: list[Task] = []
    start = update * config.tasks
    while len(batch) < config.tasks:
        turn, place = divmod(start + len(batch), len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"{config.seed}-{turn}").shuffle(order)
        batch.append(tasks[order[place]])
    return batch


def rewards_of(trajectories: Sequence[Trajectory], penalty: float) -> Tensor:
    """Episode reward less the penalty for each invalid action, [B]."""
    return torch.tensor([t.reward - penalty * sum(not turn.valid for turn in t.turns) for t in trajectories])


class _Piece(NamedTuple):
    """One sample of a trajectory: all of a transcript, or a turn's window."""

    owner: int
    number: int
    sample: Sample

    def of(self, trajectories: Sequence[Trajectory], values: Sequence[Any]) -> Sequence[Any]:
        """The part of a value a token of the trajectory that belongs to the sample's tokens."""
        count = sum(self.sample.mask)
        if count == len(values):
            return values
        begin = sum(len(turn.response_ids) for turn in trajectories[self.owner].turns[: self.number])
        return values[begin : begin + count]


def _update(
    policy: Policy,
    teacher: Policy,
    reference: Policy,
    optimizer: torch.optim.Optimizer,
    trajectories: Sequence[Trajectory],
    skills: Sequence[Skill],
    shifts: Sequence[Shifts],
    method: Method,
    config: Stage2Config,
) -> tuple[dict[str, float], Ledger]:
    """One gradient step on a batch; every mean is over all response tokens of the batch."""
    for t in trajectories:
        if any(map(math.isnan, (*t.behaviour_logp, t.reward))):
            how = t.protocol.get("tokens", "not recorded")
            raise RunError(
                f"trajectory {t.id!r}: behaviour log-probabilities or reward are unknown (tokens: {how}); "
                "only the policy's own rollouts can be trained on"
            )
    rewards = rewards_of(trajectories, config.invalid_penalty)
    groups = [n // config.group for n in range(len(trajectories))]
    advantages = group_advantages(rewards, groups)
    pieces = [_Piece(i, n, s) for i, t in enumerate(trajectories) for n, s in enumerate(policy.samples(t))]
    samples = [piece.sample for piece in pieces]
    tokens = sum(sum(s.mask) for s in samples)
    shares = [0.0] * len(trajectories)
    sums = {"loss_policy": 0.0, "loss_distill": 0.0, "kl": 0.0, "entropy": 0.0, "behaviour_gap": 0.0}
    for pack in policy.batches(samples, training=True):
        part = [samples[k] for k in pack]
        padded = policy.pad(part)
        if method.whole:
            dist = policy.next_logp(*padded, temperature=config.temperature)
            logp, entropy = sampled(dist, padded[0][padded[2]])
        else:
            dist, (logp, entropy) = None, policy.logprobs(*padded, temperature=config.temperature)
        owners, counts = [pieces[k].owner for k in pack], [sum(s.mask) for s in part]

        def cut(values: Callable[[int], Sequence[Any]], pack: list[int] = pack) -> list[Any]:
            """What `values` has a token of each trajectory, for the tokens of this batch."""
            return [v for k in pack for v in pieces[k].of(trajectories, values(pieces[k].owner))]

        behaviour = torch.tensor(cut(lambda i: trajectories[i].behaviour_logp))
        spread = torch.repeat_interleave(advantages[owners], torch.tensor(counts))
        everywhere = torch.ones(1, len(logp), dtype=torch.bool)
        advised: dict[str, Any] = {"teacher_logp": None}
        if shifts:
            advised["teacher_logp"] = torch.tensor([cut(lambda i: shifts[i].teacher_logp)])
            advised["teacher_mask"] = torch.tensor([cut(lambda i: shifts[i].mask)])
            advised["step_mask"] = torch.tensor([cut(lambda i: critical(trajectories[i], skills[i]))])
        if method.whole:
            shown = [
                policy.samples(trajectories[i], skills[i] if any(shifts[i].mask) else None)[pieces[k].number]
                for k, i in zip(pack, owners, strict=True)
            ]
            with torch.no_grad():
                target = teacher.next_logp(*policy.pad(shown), temperature=config.temperature)
            assert dist is not None
            advised |= {"student_dist": dist[None], "teacher_dist": target[None]}
        losses = method_losses(
            method,
            advantage=spread[None],
            student_logp=logp[None],
            behaviour_logp=behaviour[None],
            response_mask=everywhere,
            **advised,
        )
        for i, share in zip(owners, sum(losses.values())[0].detach().split(counts), strict=True):  # type: ignore[index]
            shares[i] += float(share.double().sum()) / tokens
        if config.kl_coef:
            with torch.no_grad():
                base, _ = reference.logprobs(*padded, temperature=config.temperature)
            losses["kl"] = config.kl_coef * kl_penalty(logp[None], base[None], everywhere)
            sums["kl"] += float(losses["kl"].detach().sum()) / config.kl_coef
        total = sum(masked_mean(loss, everywhere, tokens) for loss in losses.values())
        total.backward()  # type: ignore[union-attr]
        for name in ("policy", "distill"):
            sums[f"loss_{name}"] += float(losses[name].detach().sum()) if name in losses else 0.0
        sums["entropy"] += float(entropy.sum())
        sums["behaviour_gap"] += float((logp.detach() - behaviour).abs().sum())
    norm = _step(policy, optimizer)
    ledger = Ledger(
        method.name, float(method.beta), float(method.coef), tokens, tuple(advantages.tolist()), tuple(shares)
    )
    row = rollout_metrics(trajectories, rewards, groups) | {"grad_norm": norm}
    return row | {name: value / tokens for name, value in sums.items()}, ledger


def rollout_metrics(
    trajectories: Sequence[Trajectory], rewards: Tensor, groups: Sequence[Hashable]
) -> dict[str, float | int]:
    """What an update's episodes were like (glossary in README)."""
    steps = sum(len(t.turns) for t in trajectories)
    return {
        "success": sum(t.success for t in trajectories) / len(trajectories),
        "reward": float(rewards.mean()),
        "steps": steps / len(trajectories),
        "tokens": sum(len(t.response_ids) for t in trajectories) / len(trajectories),
        "invalid": sum(not turn.valid for t in trajectories for turn in t.turns) / steps,
        "degenerate_groups": degenerate_groups(rewards, groups),
        "penalty_groups": degenerate_groups(rewards_of(trajectories, 0.0), groups)
        - degenerate_groups(rewards, groups),
    }


def _skill_metrics(
    env: TextEnv,
    trajectories: Sequence[Trajectory],
    skills: Sequence[Skill],
    shifts: Sequence[Shifts],
    method: Method,
) -> dict[str, Any]:
    """What the skills were like and what they did; per-token means over the tokens that a skill reached."""
    if not shifts:
        return {}
    gaps = torch.tensor([d for s in shifts for d, m in zip(s.delta, s.mask, strict=True) if m])
    judged = [env.names_workflow(t.task, s) for t, s in zip(trajectories, skills, strict=True)]
    return {
        "supervised": sum(s.skill_tokens > 0 for s in shifts) / len(shifts),
        "skill_tokens": sum(s.skill_tokens for s in shifts) / len(shifts),
        "skill_accuracy": sum(judged) / len(judged),
        "shift": float(gaps.mean()) if len(gaps) else 0.0,
        "abs_shift": float(gaps.abs().mean()) if len(gaps) else 0.0,
        "gate": float(gate_weights(gaps, beta=method.beta).mean()) if len(gaps) else 0.0,
        "skills": dict(sorted(reasons(skills).items())),
    }


def alarms(row: dict[str, Any], before: Sequence[dict[str, Any]]) -> list[str]:
    """Signs of collapse in an update's metrics; the run goes on, but nobody finds out hundreds of steps later."""
    found = []
    start = before[0] if before else row
    won = [r["success"] for r in (*before, row)]
    means = [sum(won[n - 10 : n]) / 10 for n in range(10, len(won) + 1)]  # of ten updates each
    if means and means[-1] < 0.6 * max(means):
        found.append(f"success fell to {means[-1]:.0%} of the last ten updates' episodes from {max(means):.0%}")
    if len(won) >= 5 and not any(won[-5:]):
        told = row.get("penalty_groups", 0)
        found.append(f"no success in five updates; the penalty for invalid actions alone tells {told} groups apart")
    if row["entropy"] < 0.2 * start["entropy"]:
        found.append(f"entropy fell to {row['entropy']:.3f} nats from {start['entropy']:.3f}")
    if row["kl"] > 1.0:
        found.append(f"KL to the starting policy is {row['kl']:.2f} nats a token")
    if not math.isfinite(row["grad_norm"]):
        found.append("the gradient is not finite; the step was left out")
    elif row["grad_norm"] > 20:
        found.append(f"gradient norm {row['grad_norm']:.1f}")
    asked = 1 - row.get("skills", {}).get(LEFT_OUT, 0) / max(sum(row.get("skills", {}).values()), 1)
    if "supervised" in row and row["supervised"] < 0.5 * asked:
        found.append(f"only {row['supervised']:.0%} of the trajectories have a skill: {row['skills']}")
    if "abs_shift" in row and row["supervised"] > 0 and row["abs_shift"] < 1e-4:
        found.append("skills reach the teacher but move nothing (mean |Δ| < 1e-4)")
    if row["behaviour_gap"] > 1e-3:
        found.append(f"re-scored tokens differ from the rollout by {row['behaviour_gap']:.1e} nats")
    return found


# --- run directory ------------------------------------------------------------------------------------------------


def protocol_of(
    policy: Policy,
    env: TextEnv,
    tasks: Sequence[Task],
    config: Stage2Config,
    method: Method,
    analyzers: Sequence[Analyzer],
    validation: Sequence[Task] = (),
) -> dict[str, Any]:
    """All that decides a run's numbers, for its `protocol.json`."""
    return {
        "kind": "stage2",
        "config": asdict(config) | {"method": method.name, "coef": method.coef, "beta": method.beta},
        "method": {key: told(value) for key, value in vars(method).items()},
        "analyzers": [getattr(a, "author", type(a).__name__) for a in analyzers],
        "policy": {"name": policy.name, "version": policy.version},
        "environment": {"name": env.name, "engine": env.engine_name},
        "tasks": {"panel": panel_hash(list(tasks)), "count": len(tasks)},
        "validation": {"panel": panel_hash(list(validation)), "count": len(validation)},
        "versions": {"torch": torch.__version__, "safetensors": safetensors.__version__},
    }


class _Run:
    """protocol.json, metrics.jsonl, trajectories/, checkpoints/{first,last,best,0010,…}; complete after any kill."""

    def __init__(self, path, policy, env, tasks, config, method, analyzers, validation, resume) -> None:
        self.path, self.moving = Path(path), 0 < method.teacher_decay < 1
        protocol = protocol_of(policy, env, tasks, config, method, analyzers, validation)
        known = self.path / "protocol.json"
        if known.exists():
            if not resume:
                raise RunError(f"{self.path} holds a run already: resume it, or choose another directory")
            old = read_object(known)
            differing = sorted(k for k in protocol if protocol[k] != old.get(k))
            if differing:
                raise RunError(
                    f"{self.path} was started differently ({', '.join(differing)}); choose another directory"
                )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            self._checkpoint(policy, "first")
            atomic_write(known, json.dumps(protocol, indent=1))

    def reference(self, policy: Policy) -> Policy:
        """The policy as the run began."""
        reference = policy.clone()
        reference.take(self.path / "checkpoints" / "first")
        return reference

    def _checkpoint(self, policy: Policy, name: str, optimizer=None, rows=None, teacher=None) -> None:
        """Write a checkpoint folder beside its place and swap it in, so that a whole one is always there."""
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        new, old = folder / f".{name}.new", folder / f".{name}.old"
        for leftover in (new, old):
            if leftover.exists() and (leftover is new or (folder / name).exists()):
                shutil.rmtree(leftover)
        policy.save(new)
        if optimizer is not None:
            state = {
                f"{n}.{key}": value
                for n, entry in optimizer.state_dict()["state"].items()
                for key, value in entry.items()
            }
            save_file(state, new / "optimizer.safetensors")
            (new / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        if teacher is not None:
            teacher.save(new / "teacher")
        if (folder / name).exists():
            os.replace(folder / name, old)
        os.replace(new, folder / name)
        shutil.rmtree(old, ignore_errors=True)

    def restore(self, policy: Policy, optimizer: torch.optim.Optimizer, teacher: Policy) -> list[dict[str, Any]]:
        """Put policy, optimizer and EMA teacher where the last complete update left them; return the metrics."""
        folder = self.path / "checkpoints"
        for old in folder.glob(".*.old"):  # killed between the two renames of a swap
            if not (folder / old.name[1:-4]).exists():
                os.replace(old, folder / old.name[1:-4])
        source = folder / "last"
        policy.take(source if source.exists() else folder / "first")
        if not source.exists():
            atomic_write(self.path / "metrics.jsonl", "")
            return []
        if self.moving:
            teacher.take(source / "teacher")
        try:
            saved = load_file(source / "optimizer.safetensors")
            rows = json.loads((source / "rows.json").read_text(encoding="utf-8"))
            entries = _optimizer_state(saved, list(policy.own().values()))
            if not rows or [isinstance(r, dict) and r.get("update") for r in rows] != [*range(1, len(rows) + 1)]:
                raise ValueError("rows.json does not hold a row an update")
        except (OSError, TypeError, ValueError, safetensors.SafetensorError) as error:
            raise RunError(f"{source}: cannot be resumed from ({error})") from error
        optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
        atomic_write(self.path / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
        return rows

    def save(self, policy, optimizer, teacher, rows, trajectories, skills, shifts, ledger, every) -> None:
        """Keep an update: trajectories first, then the checkpoint that makes it count, then its metrics line."""
        update, done = rows[-1]["update"], len(rows)
        if done == 1 or done % every == 0:
            kept = self.path / "trajectories" / f"{update:04d}.parquet"
            write_trajectories(kept, trajectories, skills=skills, shifts=shifts or None)
            write_ledger(kept.with_suffix(".json"), ledger)
            self._checkpoint(policy, f"{update:04d}")
        scores = [r["validation_success"] for r in rows if "validation_success" in r]
        if "validation_success" in rows[-1] and scores[-1] >= max(scores):
            self._checkpoint(policy, "best")
        self._checkpoint(policy, "last", optimizer, rows, teacher if self.moving else None)
        append_jsonl(self.path / "metrics.jsonl", rows[-1])


def _optimizer_state(saved: dict[str, Tensor], parameters: Sequence[Tensor]) -> dict[int, dict[str, Tensor]]:
    """Tensors named `<parameter's number>.<name>` as an optimizer's state; ValueError where they fit no parameter."""
    entries: dict[int, dict[str, Tensor]] = {}
    for key, value in saved.items():
        number, name = key.split(".")
        entries.setdefault(int(number), {})[name] = value
        if int(number) >= len(parameters) or value.shape not in ((), parameters[int(number)].shape):
            raise ValueError(f"optimizer.safetensors: {key} fits no parameter of the policy")
    if entries and len(entries) != len(parameters):  # empty: no gradient so far was finite
        raise ValueError(f"optimizer.safetensors knows {len(entries)} of {len(parameters)} parameters")
    return entries


def told(value: Any) -> Any:
    """A method's field for the protocol: a function by its name."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else value


def read_run(path: Path | str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(protocol, metrics) of a run directory."""
    path = Path(path)
    if not (path / "protocol.json").exists():
        raise RunError(f"{path}: not a run directory (no protocol.json)")
    return read_object(path / "protocol.json"), read_jsonl(path / "metrics.jsonl").rows
