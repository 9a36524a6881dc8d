"""What a view shows: trajectories, shifts and skills as flat arrays, and the reference numbers computed from them.

Only raw signals go to the browser, once, as little-endian buffers; gap, gate, weight and loss are computed there and
held equal to `token_numbers`. Text goes as the bytes of each token that occurs, never as decoded strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from seedkit.envs import DEFAULT, places, verbs
from seedkit.gate import gate_weights
from seedkit.io import Ledger
from seedkit.methods import Method, method_losses, token_weights
from seedkit.objective import group_advantages
from seedkit.policy import Policy, load_policy
from seedkit.rescoring import Contrast
from seedkit.types import Shifts, Skill, Trajectory

CLASSES = ("verb", "object", "receptacle", "number", "tag", "other")
"""Kinds of token in a text game's commands; a function of your own has to return these names."""
PREPOSITIONS = {"to", "from", "in", "on", "with", "at", "into", "onto", "using", "of"}


class ViewError(ValueError):
    """Signals that cannot be shown; the message says what would be right."""


_WORD = re.compile(r"\s*(?:<[^<>\s]*>|\d+|[^\W\d_]+|\S)")


def _word_class(word: str, receptacles: frozenset[str]) -> str:
    """The class of a word in lower case by itself: a name is an "object" where it is none of the receptacles."""
    if word.startswith("<") and len(word) > 2:
        return "tag"
    if word.isdigit():
        return "number"
    if word in PREPOSITIONS:
        return "preposition"
    if word[0].isalpha():
        return "receptacle" if word in receptacles else "object"
    return "other"


def token_classes(pieces: Sequence[str], env: str = DEFAULT) -> list[str]:
    """The class of every token of one response, for text-game commands such as `move apple 1 to fridge 1`.

    Args:
        pieces: the tokens' texts; joined they are the response.
        env: whose places are receptacles, and whose commands begin with a verb or do not.

    Returns:
        One of `CLASSES` a token: that of the word that its first visible character belongs to. A word is a verb
        when it comes first, else a receptacle when it is one of the environment's places or a preposition stands
        before it, else an object; a word in angle brackets is a tag. Without verbs every word is an object.
    """
    found = _WORD.findall("".join(pieces))  # all of the text but for white space at its end
    receptacles = places(env)
    known = {word: _word_class(word.strip().lower(), receptacles) for word in set(found)}
    named = [known[word] for word in found]
    verb = next((n for n, name in enumerate(named) if name in ("object", "receptacle")), len(named))
    after = named.index("preposition") if "preposition" in named else len(named)
    moved = {"preposition": "other"} | ({"object": "receptacle"} if verbs(env) else {})
    named[after:] = [moved.get(name, name) for name in named[after:]]
    named.append("other")  # of pieces that nobody sees
    if verb < len(named) - 1 and verbs(env):
        named[verb] = "verb"
    size = np.array([len(piece) for piece in pieces], int)
    blank = size - np.array([len(piece.lstrip()) for piece in pieces], int)
    ends = np.cumsum([len(word) for word in found], dtype=int)
    place = np.searchsorted(ends, np.cumsum(size) - size + blank, side="right")
    return [named[n] for n in np.where(blank == size, len(found), place).tolist()]


class Vocabulary(dict[int, bytes]):
    """Bytes of every token, each read when it is first asked for.

    `joiner` stands between two tokens of a tokenizer of whole words, "" otherwise.
    """

    def __init__(self, source: Policy | Mapping[int, bytes] | Any) -> None:
        """From a policy, a `tokenizers`-backed tokenizer, or a mapping from token id to bytes."""
        super().__init__()
        self.joiner = ""
        self._given = source if isinstance(source, Mapping) else None
        self._tokenizer: Any = source.tokenizer if isinstance(source, Policy) else source
        if self._given is None:
            rules = json.loads(self._tokenizer.backend_tokenizer.to_str())
            decoder = json.dumps(rules["decoder"])
            self._added = {token["id"]: token["content"] for token in rules["added_tokens"]}
            ways = {"ByteLevel": self._level, "WordPiece": self._word}
            self._bytes = next((way for name, way in ways.items() if name in decoder), self._piece)
            if rules["decoder"] is None:
                self.joiner, self._bytes = " ", str.encode

    def __missing__(self, token: int) -> bytes:
        self[token] = raw = self._read(token)
        return raw

    def _read(self, token: int) -> bytes:
        if self._given is not None:
            return self._given[token] if token in self._given else f"<{token}?>".encode()
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.convert_ids_to_tokens(int(token)) if token >= 0 else None
        return f"<{token}?>".encode() if text is None else self._bytes(text)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, bytes that are no UTF-8 replaced."""
        return self.joiner.encode().join(self[t] for t in tokens).decode("utf-8", "replace")

    @staticmethod
    def _level(text: str) -> bytes:
        return bytes(_letters()[c] for c in text) if all(c in _letters() for c in text) else text.encode()

    @staticmethod
    def _word(text: str) -> bytes:
        return (text[2:] if text.startswith("##") else f" {text}").encode()

    @staticmethod
    def _piece(text: str) -> bytes:
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()


@cache
def _letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(256 + n): b for n, b in enumerate(hidden)}


def token_numbers(
    method: Method,
    *,
    advantage: np.ndarray,
    student: np.ndarray,
    teacher: np.ndarray,
    behaviour: np.ndarray,
    taught: np.ndarray,
    beta: float,
    coef: float,
) -> dict[str, np.ndarray]:
    """The reference for what a view shows, per token and in float64, from `seedkit.methods` itself.

    Args:
        advantage: A, reward sd. All arrays have one axis, the response tokens.
        student, teacher, behaviour: log-probabilities, nats.
        taught: True where a skill reached the teacher.

    Returns:
        delta, gate (NaN where none reached), weight, pull (weight less GRPO's own), loss.
    """
    reached = np.asarray(taught, bool) & np.isfinite(teacher)
    row = {"advantage": advantage, "student_logp": student, "behaviour_logp": behaviour}
    row["teacher_logp"] = np.where(reached, teacher, student)
    tensors: dict[str, Any] = {
        name: torch.tensor(np.asarray(values, np.float64))[None] for name, values in row.items()
    }
    masks: dict[str, Any] = {
        "response_mask": torch.ones_like(tensors["student_logp"], dtype=torch.bool),
        "teacher_mask": torch.tensor(reached)[None],
    }
    weight = token_weights(method, **tensors, **masks, beta=beta, coef=coef)[0]
    with torch.no_grad():
        losses = method_losses(method, **tensors, **masks, beta=beta, coef=coef)
    base = torch.zeros_like(weight)
    if method.policy_gradient:
        base = token_weights("grpo", **tensors, **masks)[0]
    gap = (tensors["teacher_logp"] - tensors["student_logp"])[0]
    gate = gate_weights(gap, beta=beta).numpy()
    return {
        "delta": np.where(reached, gap.numpy(), np.nan),
        "gate": np.where(reached, gate, np.nan),
        "weight": weight.numpy(),
        "pull": np.where(reached, (weight - base).numpy(), 0.0),
        "loss": sum(losses.values())[0].numpy(),  # type: ignore[index]
    }


@dataclass(frozen=True)
class State:
    """How a trajectory stands under a skill: "ok", "no skill", "misaligned" or "not finite", and what to tell."""

    name: str
    notes: tuple[str, ...] = ()


def state_of(trajectory: Trajectory, shifts: Shifts | None) -> State:
    """Whether a trajectory's shifts can be shown, and why not."""
    if shifts is None:
        return State("no skill", ("No skill reached the teacher: none was given. There is no Δ; only A counts.",))
    if shifts.trajectory != trajectory.id:
        return State("misaligned", (f"Misaligned: these shifts are of trajectory {shifts.trajectory!r}.",))
    count = len(trajectory.response_ids)
    lengths = {name: len(getattr(shifts, name)) for name in ("response_ids", "student_logp", "teacher_logp", "mask")}
    wrong = [f"{name} has {n}" for name, n in lengths.items() if n != count]
    if wrong:
        return State(
            "misaligned", (f"Misaligned: the trajectory has {count} sampled tokens, but {', '.join(wrong)}.",)
        )
    if shifts.response_ids != trajectory.response_ids:
        pairs = enumerate(zip(shifts.response_ids, trajectory.response_ids, strict=True), 1)
        odd = next(n for n, (a, b) in pairs if a != b)
        return State("misaligned", (f"Misaligned: the shifts hold other tokens, from token {odd} on.",))
    if not shifts.skill_tokens or not any(shifts.mask):
        why = shifts.reason or "no token of it was kept"
        return State("no skill", (f"No skill reached the teacher: {why}. There is no Δ; only A counts.",))
    finite = np.isfinite(shifts.student_logp) & np.isfinite(shifts.teacher_logp)
    lost = int((np.array(shifts.mask, bool) & ~finite).sum())
    if lost:
        return State("not finite", (f"{lost} log-probabilities are not finite; these tokens have no Δ.",))
    return State("ok")


def outcome_of(trajectory: Trajectory) -> str:
    """In a word or two."""
    if "success" in trajectory.protocol.get("unknown", ()):
        return "outcome unknown"
    return "success" if trajectory.success else "failure"


def advantages_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """A of each trajectory relative to the others of its task (reward sd; 0 where none other has a known reward)."""
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    unknown = rewards.isnan().tolist()
    groups = [n if unknown[n] else t.task.id for n, t in enumerate(trajectories)]
    return group_advantages(rewards.nan_to_num(), groups).tolist()


class Signals:
    """Trajectories with their shifts under one or more skills, as arrays over the response tokens of all of them.

    Arguments as for `SkillInspector`. Arrays are little-endian; rows of `student`, `teacher`, `taught`, `kl` are
    skills, rows of `checkpoint_logp` checkpoints, columns the response tokens of all trajectories in order.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        shifts: Sequence[Shifts | None] | Mapping[str, Sequence[Shifts | None]] | None,
        *,
        skills: Sequence[Skill | None] | Mapping[str, Sequence[Skill | None]] | None = None,
        checkpoints: Mapping[str, Sequence[Sequence[float]]] | None = None,
        contrasts: Sequence[Contrast | None] | Mapping[str, Sequence[Contrast | None]] | None = None,
        advantages: Sequence[float] | None = None,
        ledger: Ledger | None = None,
        policy: Any = None,
        classes: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> None:
        self.trajectories = list(trajectories)
        self.vocabulary = Vocabulary(_tokenizer(policy, self.trajectories))
        self.ledger = ledger
        self.shifts = self._by_skill("shifts", shifts)
        self.skills = self._by_skill("skills", skills, names=list(self.shifts))
        self.contrasts = self._by_skill("contrasts", contrasts, names=list(self.shifts))
        ends = np.cumsum([0, *(len(t.response_ids) for t in self.trajectories)])
        self.bounds = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        self.states = {
            name: [state_of(t, s) for t, s in zip(self.trajectories, rows, strict=True)]
            for name, rows in self.shifts.items()
        }
        total = int(ends[-1])
        behaviour = [p for t in self.trajectories for p in t.behaviour_logp]
        self.behaviour = np.array(behaviour, "<f4")
        self.advantage = self._per_trajectory(self._advantages(advantages))
        self.student = np.tile(self.behaviour, (len(self.shifts), 1))
        self.teacher = self.student.copy()
        self.taught = np.zeros((len(self.shifts), total), "u1")
        for row, name in enumerate(self.shifts):
            for (a, b), one, state in zip(self.bounds, self.shifts[name], self.states[name], strict=True):
                if one is not None and state.name != "misaligned":
                    self.student[row, a:b], self.teacher[row, a:b] = one.student_logp, one.teacher_logp
                    self.taught[row, a:b] = np.array(one.mask, bool) & np.isfinite(self.student[row, a:b])
        self.student = np.where(np.isfinite(self.student), self.student, self.behaviour).astype("<f4")
        self.recorded = ~np.isnan(self.behaviour)
        for row in self.student:  # nobody recorded o: it is taken to be s, as in the methods' table
            self.behaviour = np.where(np.isnan(self.behaviour), row, self.behaviour)
        self.checkpoints = list(checkpoints or {})
        self.checkpoint_logp = np.zeros((len(self.checkpoints), total), "<f4")
        for row, (name, logps) in enumerate((checkpoints or {}).items()):
            flat = [p for logp in logps for p in logp]
            if [len(logp) for logp in logps] != [len(t.response_ids) for t in self.trajectories]:
                raise ViewError(
                    f"checkpoint {name!r}: one log-probability for every sampled token of every trajectory"
                )
            self.checkpoint_logp[row] = flat
        number = {name: n for n, name in enumerate(CLASSES)}
        self.kind = np.array([number[c] for t in self.trajectories for c in self._classes(t, classes)], "u1")
        self._contrast_arrays(total)

    def _by_skill(self, what: str, given: Any, names: list[str] | None = None) -> dict[str, list]:
        """Rows a skill name; a plain list belongs to the one skill there is."""
        if given is None:
            return {name: [None] * len(self.trajectories) for name in names or []}
        rows = dict(given) if isinstance(given, Mapping) else {(names or ["skill"])[0]: given}
        if names is not None and (odd := sorted(set(rows) ^ set(names))):
            raise ViewError(f"{what} and shifts should have the same names; only one of them has {', '.join(odd)}")
        for name, values in rows.items():
            if len(values) != len(self.trajectories):
                raise ViewError(f"{what} {name!r}: {len(values)} for {len(self.trajectories)} trajectories")
        return {name: list(values) for name, values in rows.items()}

    def _advantages(self, given: Sequence[float] | None) -> list[float]:
        if given is None and self.ledger is not None:
            given = self.ledger.advantage
        if given is None:
            given = advantages_of(self.trajectories)
        if len(given) != len(self.trajectories):
            raise ViewError(f"advantages: {len(given)} for {len(self.trajectories)} trajectories")
        return list(given)

    def _per_trajectory(self, values: Sequence[float]) -> np.ndarray:
        return np.repeat(np.array(values, "<f4"), [b - a for a, b in self.bounds])

    def _classes(self, trajectory: Trajectory, given: Callable[[Sequence[str]], Sequence[str]] | None) -> list[str]:
        out: list[str] = []
        classes = given or partial(token_classes, env=trajectory.task.env)
        shown = {i: self.vocabulary[i].decode("utf-8", "replace") for i in set(trajectory.response_ids)}
        for turn in trajectory.turns:
            texts = [shown[i] for i in turn.response_ids]
            if self.vocabulary.joiner:
                texts[1:] = [self.vocabulary.joiner + text for text in texts[1:]]
            named = list(classes(texts))
            if len(named) != len(texts) or not set(named) <= set(CLASSES):
                raise ViewError(
                    f"classes: one of {', '.join(CLASSES)} for each of {len(texts)} tokens, got {named!r}"
                )
            out += named
        return out

    def _contrast_arrays(self, total: int) -> None:
        """Alternatives [skills, tokens, 2, top], ranks [skills, tokens, 2] (0: unknown), full KL [skills, tokens]."""
        given = [c for rows in self.contrasts.values() for c in rows if c is not None]
        self.top = given[0].ids.shape[-1] if given else 0
        shape = (len(self.shifts), total, 2)
        self.alt_ids = np.zeros((*shape, self.top), "<i4")
        self.alt_logp = np.zeros((*shape, self.top), "<f4")
        self.alt_rank = np.zeros(shape if self.top else (0,), "<i4")
        self.kl = np.full(shape[:2] if self.top else (0,), np.nan, "<f4")
        for row, rows in enumerate(self.contrasts.values()):
            for (a, b), contrast in zip(self.bounds, rows, strict=True):
                if contrast is None:
                    continue
                if len(contrast.ids) != b - a:
                    raise ViewError(f"contrasts: {len(contrast.ids)} tokens for a trajectory of {b - a}")
                self.alt_ids[row, a:b], self.alt_logp[row, a:b] = contrast.ids, contrast.logp
                self.alt_rank[row, a:b], self.kl[row, a:b] = contrast.rank, contrast.kl

    def numbers(self, trajectory: int, skill: int, method: Method, beta: float, coef: float) -> dict[str, np.ndarray]:
        """`token_numbers` of one trajectory under one skill (index, -1 for none)."""
        a, b = self.bounds[trajectory]
        row = skill if skill >= 0 else 0
        known = skill >= 0
        return token_numbers(
            method,
            advantage=self.advantage[a:b],
            student=self.student[row, a:b] if known else self.behaviour[a:b],
            teacher=self.teacher[row, a:b] if known else self.behaviour[a:b],
            behaviour=self.behaviour[a:b],
            taught=self.taught[row, a:b] if known else np.zeros(b - a, "u1"),
            beta=beta,
            coef=coef,
        )

    def frame(self, trajectory: int, skill: int, method: Method, beta: float, coef: float) -> pd.DataFrame:
        """One row a response token of a trajectory, with everything a view shows."""
        t = self.trajectories[trajectory]
        a, b = self.bounds[trajectory]
        values = self.numbers(trajectory, skill, method, beta, coef)
        known = skill >= 0
        columns: dict[str, Any] = {
            "trajectory": t.id,
            "turn": t.turn_index,
            "token_id": t.response_ids,
            "token": [self.vocabulary[i].decode("utf-8", "backslashreplace") for i in t.response_ids],
            "class": [CLASSES[k] for k in self.kind[a:b]],
            "behaviour_logp": np.where(self.recorded[a:b], self.behaviour[a:b], np.nan).astype(float),
            "student_logp": (self.student[skill, a:b] if known else self.behaviour[a:b]).astype(float),
            "teacher_logp": np.where(self.taught[skill, a:b], self.teacher[skill, a:b], np.nan) if known else np.nan,
            "advantage": self.advantage[a:b].astype(float),
            **values,
        }
        if self.top:
            columns["kl"] = self.kl[skill, a:b].astype(float)
        for row, name in enumerate(self.checkpoints):
            columns[f"checkpoint {name}"] = self.checkpoint_logp[row, a:b].astype(float)
        return pd.DataFrame(columns, index=range(b - a))

    def layout(self) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
        """Context and response tokens of all trajectories (ids, mask, turn), and what a view must know of each."""
        ids: list[int] = []
        mask: list[int] = []
        turn: list[int] = []
        about = []
        for number, t in enumerate(self.trajectories):
            start, turns = len(ids), []
            for n, one in enumerate(t.turns):
                begin = len(ids)
                ids += [*one.context_ids, *one.response_ids]
                mask += [0] * len(one.context_ids) + [1] * len(one.response_ids)
                turn += [n] * (len(ids) - begin)
                turns.append({"start": begin, "end": len(ids), "valid": one.valid, "reason": one.reason})
                turns[-1]["reward"] = None if np.isnan(one.reward) else one.reward  # JSON has no NaN
            about.append(
                {
                    "label": f"{number + 1} · {t.task.kind} · {outcome_of(t)} · {t.id}",
                    "start": start,
                    "end": len(ids),
                    "response_start": self.bounds[number][0],
                    "response_end": self.bounds[number][1],
                    "turns": turns,
                    "truncated": t.truncated,
                    "skills": [self._about_skill(name, number) for name in self.shifts],
                    "denominator": self.ledger.tokens if self.ledger else self.bounds[-1][1],
                    "logged": self.ledger.loss[number] if self.ledger else None,
                }
            )
        arrays = {"ids": np.array(ids, "<i4"), "mask": np.array(mask, "u1"), "turn": np.array(turn, "<i2")}
        return arrays, about

    def _about_skill(self, name: str, number: int) -> dict[str, Any]:
        skill, shifts, state = self.skills[name][number], self.shifts[name][number], self.states[name][number]
        who = f"{skill.author}, skill {skill.id}" if skill else ""
        return {
            "state": state.name,
            "notes": list(state.notes),
            "text": (skill.episode or (skill.reason and f"none: {skill.reason}")) if skill else None,
            "steps": sorted(skill.steps.items()) if skill else [],
            "author": who + (f", by {skill.policy_version}" if skill and skill.policy_version else ""),
            "tokens": shifts.skill_tokens if shifts else 0,
        }

    def words(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The bytes of every token that occurs: ids, ends of each in the bytes, bytes."""
        used = np.union1d(ids, self.alt_ids).tolist()
        texts = [self.vocabulary[i] for i in used]
        return {
            "vocabulary_ids": np.array(used, "<i4"),
            "vocabulary_ends": np.cumsum([len(t) for t in texts], dtype="<i4") if texts else np.zeros(0, "<i4"),
            "vocabulary": np.frombuffer(b"".join(texts), "u1"),
        }


def _tokenizer(policy: Any, trajectories: Sequence[Trajectory]) -> Any:
    """A policy, a tokenizer, or a mapping as it is; by name, or by the name in the trajectories' protocol, loaded."""
    if policy is None:
        names = {t.protocol.get("policy") for t in trajectories} - {None}
        if len(names) != 1:
            raise ViewError("policy: give the policy, its tokenizer or a mapping from token id to bytes")
        policy = names.pop()
    return load_policy(policy) if isinstance(policy, str) else policy
