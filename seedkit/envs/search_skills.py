"""What search skills say: texts for right, wrong and irrelevant advice, and the diagnosis of a finished episode.

A skill is a scope ("To compare two things:") and a workflow; hindsight on a failed episode adds the rule that
avoids its failure. Skills speak to the policy and name nothing that one question asks for.
"""

from __future__ import annotations

import re

from seedkit.envs.search_text import OPENING, f1, read_action
from seedkit.types import Trajectory

VERBS = False
SCOPES = {
    "single": "To find one fact:",
    "compare": "To compare two things:",
    "hop": "To find a fact in two steps:",
}
WORKFLOWS = {
    "single": "search the name alone, read its passage, then answer with that fact.",
    "compare": "search the first name, search the other name, compare both numbers, then answer with a name.",
    "hop": "search the name alone, read what it leads to, search that too, then answer with its fact.",
    "guess": "answer at once with a name from the question.",
    "stop": "search the first name, then answer with the first thing in its passage.",
    "circle": "search the whole question again and again.",
}
AVOID = {
    "guess": "Do not answer before you search.",
    "half": "Do not stop after one search.",
    "whole": "Do not search the whole question.",
    "again": "Do not search the same words again.",
    "silent": "Do not end without an answer.",
    "long": "Do not answer with more than the fact.",
    "fact": "Do not answer with another fact.",
}
PLACEBOS = (
    "The room is quiet and the light is good today.",
    "Be kind and stay calm, the day is long.",
    "A good friend is here, and the room is warm.",
    "It is a good day to be here, stay calm and be happy.",
)
# Plans that fail a kind of question, hence what wrong advice for it may say. A guess is right in half of comparisons.
WRONG_PLANS = {
    "single": ("guess", "circle"),
    "compare": ("single", "stop", "circle"),
    "hop": ("single", "guess", "stop", "circle"),
}
_TOLD = {
    "compare": "compare both numbers",
    "hop": "search that too",
    "guess": "answer at once",
    "stop": "answer with the first thing",
    "circle": "the whole question again",
    "single": "read its passage then answer with that fact",
}


def skill_text(scope: str, workflow: str, avoid: str | None = None) -> str:
    """A search skill in words: `scope` a kind of question, `workflow` a kind or a wrong plan, `avoid` a failure."""
    return " ".join(filter(None, (SCOPES[scope], AVOID.get(avoid or ""), WORKFLOWS[workflow])))


def named_workflow(text: str) -> str | None:
    """Which workflow a skill's text spells out, or None; the measure of an analyzer's accuracy."""
    words = " ".join(re.findall(r"\w+", text.lower()))
    return next((plan for plan, phrase in _TOLD.items() if re.search(rf"\b{phrase}\b", words)), None)


def diagnose(trajectory: Trajectory) -> str | None:
    """The failure of an episode as a key of `AVOID`, read off its own actions; None for a success."""
    if trajectory.success:
        return None
    said = [read_action(t.action) for t in trajectory.turns if t.valid]
    searches = [s.words.casefold() for s in said if s.kind == "search"]
    answers = [s.words for s in said if s.kind == "answer"]
    question = trajectory.turns[0].observation.removeprefix(OPENING).casefold()
    if not searches:
        return "guess" if answers else "silent"
    if any(s.strip(" ?") == question.strip(" ?") for s in searches):
        return "whole"
    if len(set(searches)) < len(searches):
        return "again"
    if not answers:
        return "silent"
    if trajectory.task.kind != "single" and len(searches) < 2:
        return "half"
    return "long" if f1(answers[-1], trajectory.task.spec["answers"]) else "fact"


def hindsight(trajectory: Trajectory) -> str:
    """The hindsight skill of a finished episode: its kind's workflow, and for a failure the rule that avoids it.

    Raises:
        ValueError: for a task of another kind.
    """
    kind = trajectory.task.kind
    if kind not in SCOPES:
        raise ValueError(f"no skill for questions of the kind {kind!r}; there are {', '.join(SCOPES)}")
    return skill_text(kind, kind, diagnose(trajectory))
