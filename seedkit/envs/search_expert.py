"""A player that searches, reads and answers: demonstrations from careful to forgetful.

It sees what a policy sees (text), keeps the passages it has seen in mind, and follows one of the plans below.
`noise` is the chance of a random search at each step, `slip` that of an action that is none, `forget` that of
searching again what was searched before. It reads the questions and passages of the embedded corpus only.
"""

from __future__ import annotations

import random
import re

from seedkit.envs.search_corpus import read_fact
from seedkit.envs.search_questions import parse_question
from seedkit.envs.search_text import OPENING
from seedkit.types import Observation

PLANS = {
    "single": ("first", "fact"),
    "compare": ("first", "second", "larger"),
    "hop": ("first", "bridge", "fact"),
    "guess": ("guess",),
    "stop": ("first", "top"),
    "circle": ("whole",) * 4,
}
# What someone without advice does: mediocre, in the ways people fail at these questions.
HABITS = {
    "single": {"single": 0.56, "guess": 0.24, "circle": 0.2},
    "compare": {"compare": 0.46, "single": 0.22, "stop": 0.22, "circle": 0.1},
    "hop": {"hop": 0.44, "single": 0.28, "stop": 0.18, "circle": 0.1},
}
_DOC = re.compile(r"^(?:<information>)?Doc \d+\(Title: (.*?)\) (.*?)(?:</information>)?$", re.MULTILINE)


def habit(kind: str, rng: random.Random) -> str:
    """Draw the plan of an unadvised player."""
    return rng.choices(list(HABITS[kind]), list(HABITS[kind].values()))[0]


class Expert:
    """Plays one episode: `act(observation)` returns the next action.

    Args:
        first: the episode's first observation.
        plan: a key of `PLANS`.
        rng: its own source of chance.
        noise: probability of a random search at a step.
        slip: probability of an invalid action at a step.
        forget: probability of searching the last words again (at first: the whole question) instead of going on.
    """

    def __init__(
        self,
        first: Observation,
        plan: str,
        rng: random.Random,
        *,
        noise: float = 0.0,
        slip: float = 0.0,
        forget: float = 0.0,
    ) -> None:
        self.question = first.text.removeprefix(OPENING)
        self.asked = parse_question(self.question)
        self.stages = list(PLANS[plan])
        self.rng, self.noise, self.slip, self.forget = rng, noise, slip, forget
        self.passages: dict[str, str] = {}  # title, without case -> text
        self.words = self.question  # of the last search

    def act(self, observation: Observation) -> str:
        """Take in an observation and choose an action."""
        self.passages |= {title.casefold(): text for title, text in _DOC.findall(observation.text)}
        chance = self.rng.random()
        self.stage = "noise"  # what the returned action is for: a stage of the plan, "noise", "slip" or "forget"
        if chance < self.noise:
            return self._search(self.rng.choice(re.findall(r"\w+", self.question)))
        if chance < self.noise + self.slip:
            self.stage = "slip"
            words = self.asked.names[0]
            return self.rng.choice([f"search {words}", "<search></search>", f"<answer>{words}"])
        if chance < self.noise + self.slip + self.forget:
            self.stage = "forget"
            return self._search(self.words)
        self.stage = self.stages.pop(0) if self.stages else "whole"
        return getattr(self, f"_{self.stage}")()

    def _search(self, words: str) -> str:
        self.words = words
        return f"<search>{words}</search>"

    def _answer(self, words: str) -> str:
        return f"<answer>{words}</answer>"

    def _read(self, name: str, field: str) -> str | None:
        return read_fact(self.passages.get(name.casefold(), ""), field)

    def _first(self) -> str:
        return self._search(self.asked.names[0])

    def _second(self) -> str:
        return self._search(self.asked.names[-1])

    def _whole(self) -> str:
        return self._search(self.question)

    def _bridge(self) -> str:
        return self._search(self._read(self.asked.names[0], "country") or self.asked.names[0])

    def _fact(self) -> str:
        """The fact in the passage that was searched last; what comes first there when it does not tell."""
        value = self._read(self.words, self.asked.field)
        return self._answer(value) if value else self._top()

    def _top(self) -> str:
        """The end of the first sentence: where the thing is, or what it is."""
        told = self.passages.get(self.words.casefold(), self.words).split(". ")[0]
        return self._answer(re.split(r" (?:in|of|a) ", told)[-1].strip(" ."))

    def _larger(self) -> str:
        told = [self._read(name, self.asked.field) or "" for name in self.asked.names]
        numbers = [int(number) if number.isdecimal() else 0 for number in told]
        return self._answer(self.asked.names[numbers.index(max(numbers))])

    def _guess(self) -> str:
        return self._answer(self.rng.choice(self.asked.names))
