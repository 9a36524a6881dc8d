"""Paired re-scoring: the tokens that were sampled, scored by the same weights with and without a skill.

Implements SEED's and SDAR's shift Δ = log π(y | skill context) − log π(y | ordinary context). Nothing is sampled,
decoded or re-encoded; only the prompt differs. A skill that does not reach the teacher is an explicit
`skill_tokens = 0` with a mask of False, never a silent Δ = 0; a context that does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from seedkit.gate import combine_teachers
from seedkit.policy import ContextOverflow, Policy, PolicyError, Sample
from seedkit.types import Shifts, Skill, Trajectory


def rescore(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    skills: Sequence[Skill | None],
    *,
    teacher: Policy | None = None,
    student_logp: Sequence[Sequence[float]] | None = None,
    critical_first: bool = False,
    token_budget: int = 8192,
) -> list[Shifts]:
    """Score every trajectory's sampled tokens under the ordinary and under the skill-augmented context.

    Args:
        policy: the student, and the teacher as well unless `teacher` is given (a frozen copy, say).
        trajectories: finished episodes; both branches use the temperature they were sampled at.
        skills: one a trajectory; None, or a skill with a `reason`, gives no signal.
        student_logp: the student's log-probabilities (nats) where they are known already.
        critical_first: OPID's routing. A turn with a step skill is scored with that skill alone in the context, all
            other turns with the episode skill alone; else the whole skill stands in one context.
        token_budget: padded tokens a batch; changes speed and memory, not results.

    Returns:
        One `Shifts` a trajectory, in order.

    Raises:
        ValueError: unequal numbers of trajectories and skills, or branches that differ in response ids.
        ContextOverflow: naming the trajectory and both lengths.

    Source: SEED (arXiv 2607.14777) and SDAR (arXiv 2605.15155), paired re-scoring.
    """
    if len(skills) != len(trajectories):
        raise ValueError(f"one skill (or None) a trajectory: {len(skills)} for {len(trajectories)}")
    ordinary = [policy.lay_out(t) for t in trajectories]
    for trajectory, sample in zip(trajectories, ordinary, strict=True):
        _fits(policy, trajectory, sample, "")
    students = _score(policy, trajectories, ordinary, token_budget) if student_logp is None else student_logp
    for trajectory, student in zip(trajectories, students, strict=True):
        if len(student) != len(trajectory.response_ids):
            raise ValueError(
                f"trajectory {trajectory.id!r}: {len(student)} student log-probabilities for "
                f"{len(trajectory.response_ids)} response tokens"
            )
    branches: list[tuple[int, set[int], Sample]] = []  # number of the trajectory, the turns that count, the sample
    kept = [0] * len(trajectories)
    for n, (trajectory, sample, skill) in enumerate(zip(trajectories, ordinary, skills, strict=True)):
        for part, turns in _parts(trajectory, skill, critical_first):
            advised, added = _advised(policy, teacher or policy, trajectory, sample, part)
            if advised is not None:
                branches.append((n, turns, advised))
                kept[n] += added
    owners, samples = [trajectories[n] for n, _, _ in branches], [sample for _, _, sample in branches]
    teachers = [list(map(float, student)) for student in students]
    masks = [[False] * len(student) for student in students]
    for (n, turns, _), logp in zip(branches, _score(teacher or policy, owners, samples, token_budget), strict=True):
        for place, turn in enumerate(trajectories[n].turn_index):
            if turn in turns:
                teachers[n][place], masks[n][place] = float(logp[place]), True
    version = (teacher or policy).version
    out = []
    for n, (trajectory, skill, student) in enumerate(zip(trajectories, skills, students, strict=True)):
        got = any(masks[n])
        out.append(
            Shifts(
                trajectory=trajectory.id,
                response_ids=trajectory.response_ids,
                turn=trajectory.turn_index,
                student_logp=tuple(map(float, student)),
                teacher_logp=tuple(teachers[n]),
                mask=tuple(masks[n]),
                skill_tokens=kept[n],
                skill_id=skill.id if skill and got else None,
                reason=None if got else _why_not(skill),
                policy_version=version,
            )
        )
    return out


def combine(teachers: Sequence[Sequence[Shifts]], how: str = "mean") -> list[Shifts]:
    """Several skills a trajectory as one teacher (`combine_teachers`): `teachers[j][n]` is skill j's effect on n."""
    if len(teachers) == 1:
        return list(teachers[0])
    out = []
    for rows in zip(*teachers, strict=True):
        first, reached = rows[0], [row for row in rows if any(row.mask)]
        if reached:
            logp, mask = combine_teachers(
                torch.tensor([first.student_logp], dtype=torch.float64),
                torch.tensor([[row.teacher_logp] for row in rows], dtype=torch.float64),
                torch.tensor([[row.mask] for row in rows]),
                how=how,
            )
            first = replace(first, teacher_logp=tuple(logp[0].tolist()), mask=tuple(mask[0].tolist()), reason=None)
            first = replace(first, skill_id="+".join(row.skill_id or "?" for row in reached))
        out.append(replace(first, skill_tokens=sum(row.skill_tokens for row in rows)))
    return out


def critical(trajectory: Trajectory, skill: Skill | None) -> tuple[bool, ...]:
    """True at the sampled tokens of turns that have a step skill of their own."""
    steps = skill.steps if skill and skill.ok else {}
    return tuple(bool(steps.get(turn, "").strip()) for turn in trajectory.turn_index)


def _parts(
    trajectory: Trajectory, skill: Skill | None, critical_first: bool
) -> Sequence[tuple[Skill | None, set[int]]]:
    """What stands in the teacher's context, and the turns that are scored so."""
    turns = set(trajectory.turn_index)
    if skill is None or not critical_first:
        return [(skill, turns)]
    steps = {turn for turn, own in zip(trajectory.turn_index, critical(trajectory, skill), strict=True) if own}
    alone = [(replace(skill, episode="", steps={turn: skill.steps[turn]}), {turn}) for turn in sorted(steps)]
    return [(replace(skill, steps={}), turns - steps), *alone] if turns - steps else alone


@dataclass(frozen=True)
class Contrast:
    """What student and teacher would rather have said at each sampled token; axis 1 is (student, teacher).

    Attributes:
        ids: the likeliest tokens [T, 2, top].
        logp: their log-probabilities (nats) [T, 2, top].
        rank: place of the sampled token, 1 = likeliest [T, 2].
        kl: KL(student ‖ teacher) over the whole vocabulary (nats) [T].
    """

    ids: np.ndarray
    logp: np.ndarray
    rank: np.ndarray
    kl: np.ndarray


def contrast(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    skills: Sequence[Skill | None],
    *,
    teacher: Policy | None = None,
    top: int = 5,
) -> list[Contrast | None]:
    """Compare the whole next-token distributions with and without a skill, at every sampled token.

    Args as for `rescore`; top: alternatives to keep (at most the vocabulary). None where no skill reached the
    teacher.
    """
    out: list[Contrast | None] = []
    for trajectory, skill in zip(trajectories, skills, strict=True):
        ordinary = policy.lay_out(trajectory)
        _fits(policy, trajectory, ordinary, "")
        advised, _ = _advised(policy, teacher or policy, trajectory, ordinary, skill)
        if advised is None:
            out.append(None)
            continue
        heat = trajectory.protocol.get("temperature", 1.0) or 1.0
        own = torch.tensor(trajectory.response_ids)
        parts = []
        both = policy.distributions(ordinary, heat), (teacher or policy).distributions(advised, heat)
        for student, taught in zip(*both, strict=True):  # [N, V] each, N positions at a time
            kl = (student.exp() * (student - taught)).nan_to_num().sum(-1)
            place = own[sum(len(p[3]) for p in parts) :][: len(student), None]
            sides = [side.topk(min(top, side.shape[-1])) for side in (student, taught)]
            ranks = [(side > side.gather(-1, place)).sum(-1) + 1 for side in (student, taught)]
            ids, logp = (torch.stack(x, 1).numpy() for x in ([s.indices for s in sides], [s.values for s in sides]))
            parts.append((ids, logp, torch.stack(ranks, 1).numpy(), kl.numpy()))
        out.append(Contrast(*(np.concatenate(column) for column in zip(*parts, strict=True))))
    return out


def _advised(
    policy: Policy, teacher: Policy, trajectory: Trajectory, ordinary: Sample, skill: Skill | None
) -> tuple[Sample | None, int]:
    """The teacher's sample and its skill tokens; (None, 0) when no skill reaches any of its sampled tokens."""
    if skill is None or not skill.ok or not trajectory.response_ids:
        return None, 0
    plain, sample = policy.lay_out(trajectory, Skill()), policy.lay_out(trajectory, skill)
    if trajectory.skill is None and plain.ids != ordinary.ids:
        raise PolicyError(f"trajectory {trajectory.id!r}: its contexts were not written by this policy's tokenizer")
    if _responses(sample) != trajectory.response_ids or _responses(ordinary) != trajectory.response_ids:
        raise ValueError(f"trajectory {trajectory.id!r}: the branches do not hold the same response ids")
    added = len(sample.ids) - len(plain.ids)
    if added == 0:
        return None, 0
    _fits(teacher, trajectory, sample, f" with the skill ({len(plain.ids)} without)")
    return sample, added


def _fits(policy: Policy, trajectory: Trajectory, sample: Sample, how: str) -> None:
    if len(sample.ids) > policy.max_length:
        raise ContextOverflow(
            f"trajectory {trajectory.id!r}: its context has {len(sample.ids)} tokens{how}, the model reads "
            f"{policy.max_length}"
        )


def _why_not(skill: Skill | None) -> str:
    if skill is None:
        return "no skill"
    return skill.reason or ("no token of the skill reached the teacher" if skill.ok else "no skill")


def _responses(sample: Sample) -> tuple[int, ...]:
    return tuple(i for i, m in zip(sample.ids, sample.mask, strict=True) if m)


def _score(policy: Policy, trajectories: Sequence[Trajectory], samples: Sequence[Sample], budget: int) -> list:
    """Response log-probabilities, each trajectory at its own temperature (greedy ones at 1)."""
    out: list = [None] * len(samples)
    for temperature in {t.protocol.get("temperature", 1.0) or 1.0 for t in trajectories}:
        at = [n for n, t in enumerate(trajectories) if (t.protocol.get("temperature", 1.0) or 1.0) == temperature]
        scored = policy.token_logprobs([samples[n] for n in at], temperature=temperature, token_budget=budget)
        for n, logp in zip(at, scored, strict=True):
            out[n] = logp.tolist()
    return out
