"""Who writes the skills: the current policy (SEED), a frozen one, a rule, a library (SDAR), or nobody (placebos).

One protocol, `write_skills(trajectories) → list[Skill]`, one skill a trajectory. A failure is a skill with a
reason, and the reasons are counted; no signal is better than a wrong one. `EndpointAnalyzer`, a chat model behind a
server, has a module of its own. Leaves out for now: UCB retrieval.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from seedkit.analysis import parse_analysis
from seedkit.endpoint import EndpointAnalyzer
from seedkit.envs import DEFAULT, advice
from seedkit.envs.base import data_dir
from seedkit.io import DataError, read_records
from seedkit.policy import Policy
from seedkit.types import Skill, Task, Trajectory

__all__ = [
    "Analyzer",
    "EndpointAnalyzer",
    "FrozenAnalyzer",
    "PlaceboAnalyzer",
    "PolicyAnalyzer",
    "Replay",
    "RuleAnalyzer",
    "SkillError",
    "SkillLibrary",
    "by_name",
    "parse_analysis",
    "reasons",
]

MAX_ANALYSIS_TOKENS = 64


class SkillError(ValueError):
    """A skill file that cannot be used; names the file and what would be right."""


@runtime_checkable
class Analyzer(Protocol):
    """Anything that turns finished trajectories into skills."""

    def write_skills(self, trajectories: Sequence[Trajectory]) -> list[Skill]:
        """One skill a trajectory, in order; a skill with a `reason` where none could be written."""
        ...


def reasons(skills: Sequence[Skill]) -> Counter[str]:
    """Why skills are missing, counted; "ok" counts the ones that are there."""
    return Counter("ok" if skill.ok else skill.reason or "empty" for skill in skills)


class PolicyAnalyzer:
    """The policy itself reads its finished episodes and writes the skill (SEED's analyzer; refreshed as it learns).

    Args:
        policy: the checkpoint that writes.
        temperature: of the writing; 0 is greedy.
        max_new_tokens: longest analysis; a longer one is cut, does not parse, and is counted.
    """

    author = "policy"

    def __init__(
        self, policy: Policy, *, temperature: float = 0.0, seed: int = 0, max_new_tokens: int = MAX_ANALYSIS_TOKENS
    ) -> None:
        self.policy, self.temperature, self.seed, self.max_new_tokens = policy, temperature, seed, max_new_tokens

    def write_skills(self, trajectories: Sequence[Trajectory]) -> list[Skill]:
        """Ask for the analysis of every trajectory and parse it."""
        prompts = [self.policy.analysis_ids(t) for t in trajectories]
        room = self.policy.max_length - self.max_new_tokens
        fitting = [n for n, prompt in enumerate(prompts) if len(prompt) <= room]
        answers = self.policy.generate(
            [prompts[n] for n in fitting],
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seeds=[self.seed + n for n in fitting],
        )
        texts = dict(zip(fitting, map(self.policy.decode, answers), strict=True))
        version = self.policy.version
        skills = []
        for n, trajectory in enumerate(trajectories):
            known = n in texts
            skill = parse_analysis(texts[n], turns=len(trajectory.turns)) if known else Skill(reason="does not fit")
            skills.append(replace(skill, author=self.author, source=trajectory.id, policy_version=version))
        return skills


class FrozenAnalyzer(PolicyAnalyzer):
    """A copy of the policy as it is now, never refreshed (SEED's ablation "static analyzer")."""

    author = "frozen policy"

    def __init__(self, policy: Policy, **options) -> None:
        super().__init__(policy.clone(), **options)


class RuleAnalyzer:
    """A deterministic annotator: Stage 1 without a network. `rule` maps a trajectory to the skill's text.

    Without a rule it is the `hindsight` of the trajectory's environment.
    """

    author = "rule"

    def __init__(self, rule: Callable[[Trajectory], str] | None = None) -> None:
        self.rule = rule or (lambda trajectory: advice(trajectory.task.env).hindsight(trajectory))

    def write_skills(self, trajectories: Sequence[Trajectory]) -> list[Skill]:
        """Apply the rule; a trajectory that it cannot read gets a reason."""
        skills = []
        for trajectory in trajectories:
            try:
                skill = Skill(self.rule(trajectory))
            except (ValueError, IndexError) as error:
                skill = Skill(reason=f"rule: {error}")
            skills.append(replace(skill, author=self.author, source=trajectory.id))
        return skills


class Replay:
    """Skills written earlier, with the authors they had, from a file of `io.write_trajectories(…, skills=…)`.

    A skill belongs to the trajectory of the same id and the same sampled tokens; any other trajectory gets the reason
    "not recorded". Answers of a server repeat with `EndpointAnalyzer(replay=…)`.

    Raises:
        DataError: for a file that cannot be read, or that has two skills for one trajectory.
    """

    def __init__(self, path: Path | str) -> None:
        self.author = f"replay ({Path(path).name})"
        self.skills: dict[tuple[str, tuple[int, ...]], Skill] = {}
        for n, (trajectory, skill, _) in enumerate(read_records(path), 1):
            if skill and self.skills.setdefault((trajectory.id, trajectory.response_ids), skill) != skill:
                raise DataError(f"{path} row {n}: should be the only skill of the trajectory {trajectory.id!r}")

    def write_skills(self, trajectories: Sequence[Trajectory]) -> list[Skill]:
        """The recorded skill of each trajectory; one that was recorded with a reason keeps it."""
        missing = Skill(author=self.author, reason="not recorded")
        return [replace(self.skills.get((t.id, t.response_ids), missing), source=t.id) for t in trajectories]


class SkillLibrary:
    """Skills in Markdown files, found by task kind, else by keyword in the task text (SDAR's retrieval).

    A file starts with a front matter of `kind: clean` and `keywords: clean, wash` between `---` lines; the rest is
    the skill. Keywords match whole words of the task sentence only. A task that nothing matches gets a skill with
    the reason "no match", or an error with `strict`. Without a folder it is the committed library of the task's
    environment.
    """

    author = "library"

    def __init__(self, folder: Path | None = None, *, strict: bool = False) -> None:
        self.folder, self.strict = folder and Path(folder), strict
        self._read: dict[Path, dict[str, tuple[tuple[str, ...], str]]] = {}
        if folder is not None:
            self.skills()

    def skills(self, env: str = DEFAULT) -> dict[str, tuple[tuple[str, ...], str]]:
        """Keywords and text of every kind of task; `env` matters where no folder was given."""
        folder = self.folder or data_dir() / "skills" / env
        if folder not in self._read:
            skills, files = {}, sorted(folder.glob("*.md"))
            if not files:
                raise SkillError(f"{folder}: no skill files (*.md)")
            for path in files:
                kind, keywords, text = _read_skill(path)
                if kind in skills:
                    raise SkillError(f"{path}: a second file for kind {kind!r}")
                skills[kind] = (keywords, text)
            self._read[folder] = skills
        return self._read[folder]

    def find(self, kind: str, text: str, env: str = DEFAULT) -> Skill:
        """The skill for a task kind, else the one skill whose keyword stands in the task sentence."""
        skills = self.skills(env)
        if kind in skills:
            return Skill(skills[kind][1], author="library")
        sentence = text.lower().rsplit("your task is to:", 1)[-1].strip().split("\n")[0]
        hits = [
            body for words, body in skills.values() if any(re.search(rf"\b{re.escape(w)}\b", sentence) for w in words)
        ]
        if len(hits) == 1:
            return Skill(hits[0], author="library")
        reason = "no match" if not hits else "several match"
        if self.strict:
            raise SkillError(f"{reason}: no single library skill for the task {sentence!r}")
        return Skill(author="library", reason=reason)

    def write_skills(self, trajectories: Sequence[Trajectory]) -> list[Skill]:
        """The library's skill for each trajectory's task."""
        first = [t.turns[0].observation if t.turns else t.final_observation for t in trajectories]
        return [
            replace(self.find(t.task.kind, text, t.task.env), source=t.id)
            for t, text in zip(trajectories, first, strict=True)
        ]

    def write_for(self, tasks: Sequence[Task]) -> list[Skill]:
        """The library's skill for each task, by kind: what prompting puts into the student's context."""
        return [self.find(task.kind, "", task.env) for task in tasks]


def read_skill(path: Path) -> Skill:
    """A skill of one's own from a text file, or from a library file, whose front matter is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise SkillError(f"{path}: not a text file in UTF-8 ({error})") from error
    text = _read_skill(path)[2] if text.startswith("---\n") else " ".join(text.split())
    if not text:
        raise SkillError(f"{path}: the skill's text is empty")
    return Skill(text, author=path.name)


class PlaceboAnalyzer:
    """Our control: skills that are there but cannot help, in place of those that another analyzer writes.

    Where it writes none there is no placebo either, so that the same tokens are supervised. A trajectory gets the
    same placebo in any batch.

    Args:
        analyzer: whose skills to replace.
        kind: "irrelevant" (text about nothing of the task), "other_task" (the library's skill for another kind of
            task) or "shuffled" (the very skill, its words in random order).
        seed: of the choice or the order.
        library: where "other_task" looks; None is the committed one.
    """

    KINDS = ("irrelevant", "other_task", "shuffled")

    def __init__(self, analyzer: Analyzer, kind: str, *, seed: int = 0, library: SkillLibrary | None = None) -> None:
        if kind not in self.KINDS:
            raise ValueError(f"unknown placebo {kind!r}; choose one of {', '.join(self.KINDS)}")
        self.analyzer, self.kind, self.seed, self.library = analyzer, kind, seed, library or SkillLibrary()
        self.author = f"placebo ({kind})"

    def write_skills(self, trajectories: Sequence[Trajectory]) -> list[Skill]:
        """A placebo for every skill of the other analyzer, episode and step texts alike."""
        real = self.analyzer.write_skills(trajectories)
        return [self._instead(t, skill) if skill.ok else skill for t, skill in zip(trajectories, real, strict=True)]

    def _instead(self, trajectory: Trajectory, skill: Skill) -> Skill:
        rng = random.Random(f"{self.seed}-{trajectory.id}-{trajectory.seed}")
        task = trajectory.task
        others = [text for kind, (_, text) in sorted(self.library.skills(task.env).items()) if kind != task.kind]

        def fake(text: str) -> str:
            if not text.strip():
                return text
            if self.kind == "shuffled":
                return " ".join(rng.sample(words := text.split(), len(words)))
            return rng.choice(advice(task.env).PLACEBOS if self.kind == "irrelevant" else others)

        steps = {turn: fake(text) for turn, text in sorted(skill.steps.items())}
        return replace(skill, episode=fake(skill.episode), steps=steps, author=self.author)


def by_name(name: str, policy: Policy, *, instead_of: str = "self") -> Analyzer:
    """The analyzer that a word stands for: "self", "frozen", "rule", "library" or a placebo for `instead_of`."""
    if name in PlaceboAnalyzer.KINDS:
        return PlaceboAnalyzer(by_name(instead_of, policy), name)
    if name == "self":
        return PolicyAnalyzer(policy)
    if name == "frozen":
        return FrozenAnalyzer(policy)
    if name == "rule":
        return RuleAnalyzer()
    if name == "library":
        return SkillLibrary()
    raise ValueError(
        f"unknown analyzer {name!r}; choose one of self, frozen, rule, library, {', '.join(PlaceboAnalyzer.KINDS)}"
    )


def _read_skill(path: Path) -> tuple[str, tuple[str, ...], str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SkillError(f"{path}: not UTF-8 text ({error.reason})") from error
    found = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL)
    if not found:
        raise SkillError(f"{path}: expected a front matter between two --- lines, then the skill")
    fields = dict(re.findall(r"^(\w+):[ \t]*(.*?)[ \t]*$", found.group(1), re.MULTILINE))
    for name in ("kind", "keywords"):
        if not fields.get(name):
            raise SkillError(f"{path}: the front matter lacks {name!r}")
    keywords = tuple(w.strip().lower() for w in fields["keywords"].split(",") if w.strip())
    if not keywords:
        raise SkillError(f"{path}: the front matter's 'keywords' holds none")
    body = " ".join(found.group(2).split())
    if not body:
        raise SkillError(f"{path}: the skill's text is empty")
    return fields["kind"], keywords, body
