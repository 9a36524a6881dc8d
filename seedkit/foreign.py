"""Other people's rollouts, and another policy's, as trajectories: tokenized once by the policy that will score them.

Leaves out: prompts that are windows (a response is scored after the whole episode so far, not after its author's
prompt), and telling a response that was cut off from a whole one: each gets the policy's end marker.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from seedkit.actions import parse_action
from seedkit.foreign_formats import FORMATS, BadRecord, Episode, attempt, episodes
from seedkit.io import DataError
from seedkit.policy import Policy
from seedkit.types import Task, Trajectory, Turn, digest

MOST_UNKNOWN = 0.5
"""Largest share of tokens that the policy's tokenizer has no word for, in the observations or in the responses."""
MAX_CHARACTERS = 2_000_000
"""A trajectory with more text than this is not even tokenized."""


class Skipped(NamedTuple):
    """A record that is no trajectory: its line (JSONL), entry (JSON) or episode (text), from 1; why; and the case."""

    file: str
    record: int
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Foreign:
    """What a file gave: its format, its trajectories, and the records that were skipped."""

    format: str
    trajectories: list[Trajectory]
    skipped: list[Skipped]

    @property
    def reasons(self) -> Counter[str]:
        """How many records were skipped for each reason."""
        return Counter(one.reason for one in self.skipped)


def read_foreign(path: str | os.PathLike[str], policy: Policy, *, format: str | None = None) -> Foreign:
    """Read a file of rollouts that another program wrote, for this policy to score.

    Args:
        path: the file, UTF-8.
        policy: its tokenizer makes tokens of every observation and response, once; another policy's would not fit.
        format: one of `FORMATS`; None: that of the first record that has the fields of one.

    Returns:
        The trajectories in the file's order. What the file cannot tell is named in `protocol["unknown"]` and holds
        NaN (`behaviour_logp`, nats; `reward`), False (`success`), "unknown" (`policy_version`) or 0 (`seed`).
        Success: `success`, `won` or `is_success`. Reward: `episode_rewards`, `reward`, `score` or the sum of the
        steps' `rewards`, else success as 0 or 1; it stands at the last turn. Episodes of one task share a task id:
        of one `uid`, else of one training step and first observation. `protocol` also says `"tokens": "retokenized"`,
        the format, the file (`source`), the record, and the share of tokens that the vocabulary has no word for, in
        observations and in responses (`unknown_tokens`).

    Raises:
        DataError: no known format or no usable record, with the first reasons.
        ValueError: a `format` that there is not.
    """
    if format not in (None, *FORMATS):
        raise ValueError(f"unknown format {format!r}; choose one of {', '.join(FORMATS)}")
    found, read = episodes(Path(path).read_bytes(), format)
    trajectories, skipped = [], []
    for n, episode in read:
        made = episode if isinstance(episode, BadRecord) else attempt(_trajectory, policy, episode)
        if isinstance(made, BadRecord):
            skipped.append(Skipped(str(path), n, *made.args))
        else:
            name, about = Path(path).name, {"format": found, "source": Path(path).name, "record": n}
            trajectories.append(replace(made, id=f"{name}:{n}", protocol=made.protocol | about))
    if not trajectories:
        first = [f"record {s.record}: {s.reason}" + f" ({s.detail})" * bool(s.detail) for s in skipped[:3]]
        what = f"no usable trajectory in it, read as {found}" if found else "no rollouts in a known format"
        raise DataError(f"{path}: {'; '.join([what, *first])}")
    return Foreign(str(found), trajectories, skipped)


def retokenize(trajectory: Trajectory, policy: Policy) -> Trajectory:
    """The episode in this policy's tokens, to be scored by it: a response is its action, `played_by` who said it.

    Raises:
        DataError: naming the trajectory and why its text cannot be scored.
    """
    told, known = trajectory, "success" not in trajectory.protocol.get("unknown", ())
    episode = Episode(
        [(turn.observation, turn.action) for turn in told.turns],
        told.final_observation,
        reward=told.reward,
        success=told.success if known else None,
        admissible=[turn.admissible or () for turn in told.turns],
    )
    try:
        made = _trajectory(policy, episode)
    except BadRecord as bad:
        raise DataError(f"trajectory {told.id!r}: {': '.join(bad.args)}") from None
    about = {"played_by": told.protocol.get("policy", told.policy_version), **made.protocol}
    return replace(made, id=told.id, task=told.task, protocol=about)


def recognise(path: str | os.PathLike[str]) -> str | None:
    """The format of a file, one of `FORMATS`, or None."""
    return episodes(Path(path).read_bytes(), None)[0]


def _trajectory(policy: Policy, episode: Episode) -> Trajectory:
    texts = [text for turn in episode.turns for text in turn]
    whole = "".join([*texts, episode.final])
    if not texts:
        raise BadRecord("no response")
    for n, text in enumerate(texts):
        if not text.strip():
            raise BadRecord("empty response" if n % 2 else "a response to nothing", f"turn {n // 2 + 1}")
    if len(whole) > MAX_CHARACTERS:
        raise BadRecord("too much text", f"{len(whole)} characters, at most {MAX_CHARACTERS} are read")
    if re.search("[\ud800-\udfff]", whole):
        raise BadRecord("lone surrogates in the text")
    turns, tokens = [], {"observations": [], "responses": []}
    for n, (seen, said) in enumerate(episode.turns):
        admissible = episode.admissible[n] if episode.admissible else ()
        context, ids = policy.prompt_ids(turns, seen, admissible), policy.encode(said)
        tokens["observations"] += policy.encode(seen)
        tokens["responses"] += ids
        ids.append(policy.end_id)
        action = parse_action(said, admissible or None)
        own = (tuple(ids), (math.nan,) * len(ids), action.text, action.valid, action.reason)
        turns.append(Turn(seen, admissible, tuple(context), *own))
    lengths = [len(t.context_ids) + len(t.response_ids) for t in turns]
    if (length := sum(lengths) if policy.layout.window is None else max(lengths)) > policy.max_length:
        raise BadRecord("context too long", f"{length} tokens, the model reads {policy.max_length}")
    shares = {name: ids.count(policy.tokenizer.unk_token_id) / max(len(ids), 1) for name, ids in tokens.items()}
    if not all(tokens.values()) or max(shares.values()) > MOST_UNKNOWN:
        raise BadRecord(
            "mostly unknown tokens", ", ".join(f"{share:.0%} of {name}" for name, share in shares.items())
        )
    success = episode.success
    reward = episode.reward if episode.reward is not None else math.nan if success is None else float(success)
    turns[-1] = replace(turns[-1], reward=reward)
    unknown = ["behaviour_logp", "policy_version", "seed"]
    unknown += ["reward"] * math.isnan(reward) + ["success"] * (success is None)
    protocol = {"tokens": "retokenized", "tokenizer": policy.name, "unknown": unknown}
    window = policy.layout.window
    protocol["context"] = "transcript" if window is None else f"window of {window}"
    protocol["unknown_tokens"] = shares
    task = Task(digest(ascii(episode.group or texts[0])), "foreign", "unknown", "foreign")
    return Trajectory("", task, tuple(turns), success is True, reward, "unknown", 0, episode.final, protocol=protocol)
