"""Batched multi-turn rollouts: `collect` plays tasks with a policy and returns finished trajectories.

Sampling is seeded a trajectory, so the batch size does not change who says what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from seedkit.actions import parse_action
from seedkit.envs.base import TextEnv
from seedkit.policy import Policy
from seedkit.types import Observation, Skill, Task, Trajectory, Turn, digest


def collect(
    policy: Policy,
    env: TextEnv,
    tasks: Sequence[Task],
    *,
    group: int = 1,
    members: Sequence[int] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    max_steps: int = 20,
    skills: Sequence[Skill | None] | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 128,
    progress: bool = False,
) -> list[Trajectory]:
    """Play every task `group` times.

    Args:
        group: episodes a task (GRPO's group), side by side in the result.
        members: number of each task's first episode within its group, where several calls play a group; None for 0.
        temperature: of sampling; 0 is greedy. The log-probabilities kept are at this temperature.
        max_steps: turns after which an unfinished episode counts as failed (`truncated`); the environment may have a
            lower limit of its own.
        max_new_tokens: longest answer; None for what the environment's actions may take: `env.max_action_tokens`, or
            more where an admissible action has more of this policy's tokens. Reasoning needs more.
        skills: one skill a task to put into the *student's* prompt (prompting, Skill-GRPO); None for none.
        batch_size: episodes played side by side; changes speed and memory, not results.

    Returns:
        `len(tasks) * group` trajectories, task by task.
    """
    settings = {"group": group, "max_steps": max_steps, "batch_size": batch_size, "max_new_tokens": max_new_tokens}
    for name, value in settings.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    max_steps = min(max_steps, env.max_steps)
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if skills is not None and len(skills) != len(tasks):
        raise ValueError(f"one skill a task: {len(skills)} skills for {len(tasks)} tasks")
    if members is not None and len(members) != len(tasks):
        raise ValueError(f"one member a task: {len(members)} members for {len(tasks)} tasks")
    version = policy.version
    window = policy.layout.window
    context = "transcript" if window is None else f"window of {window}"
    protocol = {"temperature": temperature, "max_steps": max_steps, "context": context, "policy": policy.name}
    protocol |= {"max_new_tokens": max_new_tokens or env.max_action_tokens}
    first = members or [0] * len(tasks)
    jobs = [(task, skills[n] if skills else None, first[n] + g) for n, task in enumerate(tasks) for g in range(group)]
    done: list[Trajectory | None] = [None] * len(jobs)
    bar = tqdm(total=len(jobs), desc="rollout", unit="episode", disable=not progress, leave=False)
    for start in range(0, len(jobs), batch_size):
        rows = [_Row(policy, env.clone(), *jobs[n], seed) for n in range(start, min(start + batch_size, len(jobs)))]
        numbers = list(range(start, start + len(rows)))
        talk = policy.converse(len(rows))
        while rows:
            limits = [max_new_tokens or row.limit() for row in rows]
            budget = [policy.max_length - row.length - len(row.context) for row in rows]
            full = [n for n, room in enumerate(budget) if room < limits[n]]
            for n in full:
                rows[n].finish(truncated=True)
            if not full:
                if window is not None:  # every prompt is new: nothing to keep
                    talk = policy.converse(len(rows))
                answers, logps = talk.say([r.context for r in rows], [r.rng for r in rows], limits, temperature)
                for row, answer, logp in zip(rows, answers, logps, strict=True):
                    row.act(answer, logp, max_steps)
            live = [n for n, row in enumerate(rows) if not row.over]
            for n, row in enumerate(rows):
                if row.over:
                    done[numbers[n]] = row.trajectory(version, protocol | {"grammar": env.grammar(row.task)})
                    bar.update()
            if len(live) < len(rows) and live:
                talk.keep(live)
            rows, numbers = [rows[n] for n in live], [numbers[n] for n in live]
        del talk  # its cache: an engine's parser keeps tracebacks, and with them this frame, until a collection
        finished = [t for t in done if t is not None]
        bar.set_postfix(success=f"{sum(t.success for t in finished) / len(finished):.2f}")
    bar.close()
    return [t for t in done if t is not None]


class _Row:
    """One episode in progress."""

    def __init__(self, policy: Policy, env: Any, task: Task, skill: Skill | None, member: int, seed: int) -> None:
        self.policy, self.env, self.task, self.skill, self.member, self.seed = policy, env, task, skill, member, seed
        self.rng = np.random.default_rng([seed, member, int(digest([task.id, task.spec], 8), 16)])
        self.now = env.reset(task)
        self.context = policy.prompt_ids([], self.now.text, self.now.admissible, skill)
        self.turns: list[Turn] = []
        self.length = 0
        self.over = self.truncated = False

    def limit(self) -> int:
        """Tokens of the longest admissible action and its end marker, at least what the environment says."""
        actions = self.now.admissible or ()
        return max([self.env.max_action_tokens, *(len(self.policy.encode(action)) + 1 for action in actions)])

    def act(self, ids: list[int], logp: list[float], max_steps: int) -> None:
        before, seen = self.now, self.context
        action = parse_action(self.policy.decode(ids), before.admissible)
        # an invalid action is not sent; the environment's answer to it is known
        nothing = Observation("Nothing happens.", before.admissible, reason=action.reason)
        self.now = self.env.step(action.text) if action.valid else nothing
        self.turns.append(
            Turn(
                before.text,
                before.admissible,
                tuple(seen),
                tuple(ids),
                tuple(logp),
                action.text,
                self.now.reason is None,
                self.now.reason,
                self.now.reward,
            )
        )
        if self.policy.layout.window is None:
            self.length += len(seen) + len(ids)
        if self.now.done or len(self.turns) >= max_steps:
            self.finish(truncated=not self.now.done)
        else:
            self.context = self.policy.prompt_ids(self.turns, self.now.text, self.now.admissible, self.skill)

    def finish(self, truncated: bool) -> None:
        self.over, self.truncated = True, truncated
        self.env.close()

    def trajectory(self, version: str, protocol: dict[str, Any]) -> Trajectory:
        return Trajectory(
            id=f"{self.task.id}/{self.seed}.{self.member}",
            task=self.task,
            turns=tuple(self.turns),
            success=self.now.success,
            reward=float(sum(t.reward for t in self.turns)),
            policy_version=version,
            seed=self.seed,
            final_observation=self.now.text,
            truncated=self.truncated,
            skill=self.skill,
            protocol=protocol,
        )
