"""The records that flow through the kit: task, trajectory, skill, shifts.

Plain frozen dataclasses. Token ids are the sampled ids, always ("token in, token out"); text is for people.
`seedkit.io` writes them as `datasets` rows and reads them back equal.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import chain
from typing import Any


def digest(value: Any, length: int = 12) -> str:
    """Short SHA-256 of a JSON-serialisable value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


@dataclass(frozen=True)
class Task:
    """One episode's assignment. `spec` is what the environment needs to rebuild it, and nothing else."""

    id: str
    env: str
    split: str
    kind: str
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Action:
    """What the policy's text means to the environment. `reason` says why an invalid action is invalid."""

    text: str
    valid: bool
    reason: str | None = None


@dataclass(frozen=True)
class Observation:
    """What an environment returns from `reset` and `step`.

    `admissible` is None where any text may be sent; the environment then reads it itself, and `reason` says why the
    action before was invalid.
    """

    text: str
    admissible: tuple[str, ...] | None = ()
    reward: float = 0.0
    done: bool = False
    success: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Skill:
    """A hindsight skill, or the reason why there is none.

    `episode` advises the whole episode, `steps[i]` the request to act at turn i. `author` names the analyzer
    and `policy_version` the weights that wrote it; `source` is the trajectory it was read off.
    """

    episode: str = ""
    steps: dict[int, str] = field(default_factory=dict)
    author: str = "user"
    source: str | None = None
    policy_version: str | None = None
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """True when there is advice to give and no reason against it."""
        return self.reason is None and bool(self.episode or self.steps)

    @property
    def id(self) -> str:
        """Hash of the advice alone: two skills that say the same share it."""
        return digest([self.episode, {str(k): v for k, v in self.steps.items()}])


@dataclass(frozen=True)
class Turn:
    """One observation and the policy's answer to it.

    Attributes:
        observation: text the policy saw before acting.
        admissible: actions the environment would accept here; None for any text.
        context_ids: tokens added to the context since the last response (task and first observation in turn 0).
        response_ids: sampled tokens, the end-of-turn token included when it was sampled.
        behaviour_logp: log-probability of each response token under the sampling policy, at the
            rollout's temperature (nats); NaN where it is not known (`seedkit.foreign`).
        action: what was sent to the environment; `valid` and `reason` come from the action parser, or from an
            environment that reads free text.
        reward: the environment's reward for it, before any penalty.
    """

    observation: str
    admissible: tuple[str, ...] | None
    context_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    behaviour_logp: tuple[float, ...]
    action: str
    valid: bool
    reason: str | None = None
    reward: float = 0.0


@dataclass(frozen=True)
class Trajectory:
    """A finished episode. `protocol` holds what decides its numbers (temperature, step limit, grammar, ...).

    `protocol["unknown"]`, where there is one, names fields that hold a stand-in because nobody recorded them.
    """

    id: str
    task: Task
    turns: tuple[Turn, ...]
    success: bool
    reward: float
    policy_version: str
    seed: int
    final_observation: str = ""
    truncated: bool = False
    skill: Skill | None = None
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def response_ids(self) -> tuple[int, ...]:
        """All sampled tokens in order."""
        return tuple(chain.from_iterable(turn.response_ids for turn in self.turns))

    @property
    def behaviour_logp(self) -> tuple[float, ...]:
        """Their log-probabilities under the sampling policy (nats)."""
        return tuple(chain.from_iterable(turn.behaviour_logp for turn in self.turns))

    @property
    def turn_index(self) -> tuple[int, ...]:
        """The turn each sampled token belongs to."""
        return tuple(n for n, turn in enumerate(self.turns) for _ in turn.response_ids)


@dataclass(frozen=True)
class Shifts:
    """Student and teacher log-probabilities of one trajectory's sampled tokens (nats, same length).

    `skill_tokens` counts the skill's tokens that really stood in the teacher's context; 0 means that no skill
    reached it, and then `mask` is False everywhere: no signal, rather than a silent shift of zero.
    """

    trajectory: str
    response_ids: tuple[int, ...]
    turn: tuple[int, ...]
    student_logp: tuple[float, ...]
    teacher_logp: tuple[float, ...]
    mask: tuple[bool, ...]
    skill_tokens: int
    skill_id: str | None = None
    reason: str | None = None
    policy_version: str | None = None

    @property
    def delta(self) -> tuple[float, ...]:
        """The skill-induced shift, teacher minus student (nats)."""
        return tuple(k - s for k, s in zip(self.teacher_logp, self.student_logp, strict=True))
