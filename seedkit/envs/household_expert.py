"""A player that searches, then acts: demonstrations from careful to forgetful.

It sees what a policy sees (text), keeps what it has seen in mind, follows one of the plans below and, once the
plan is used up without success, wanders. `noise` is the chance of a random move at each step, `slip` that of a
command the game does not accept, `forget` that of looking again where it has looked before.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from seedkit.envs.household_skills import parse_goal
from seedkit.types import Observation

PLANS = {
    "pick": ("find", "take", "put"),
    "clean": ("find", "take", "clean", "put"),
    "heat": ("find", "take", "heat", "put"),
    "cool": ("find", "take", "cool", "put"),
    "two": ("find", "take", "put", "find", "take", "put"),
    "look": ("find", "take", "light"),
    "drop": ("find", "take", "back"),
    "idle": ("find", "take"),
}
TOOL = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
# What someone without advice does: mediocre, in the ways people fail at these tasks.
HABITS = {
    "pick": {"pick": 0.52, "drop": 0.48},
    "clean": {"clean": 0.38, "pick": 0.36, "drop": 0.12, "heat": 0.07, "cool": 0.07},
    "heat": {"heat": 0.38, "pick": 0.36, "drop": 0.12, "clean": 0.07, "cool": 0.07},
    "cool": {"cool": 0.38, "pick": 0.36, "drop": 0.12, "clean": 0.07, "heat": 0.07},
    "two": {"two": 0.52, "pick": 0.35, "drop": 0.13},
    "look": {"look": 0.52, "idle": 0.33, "drop": 0.15},
}
_THING = re.compile(r"\b([a-z]+) (\d+)\b")


def habit(kind: str, rng: random.Random) -> str:
    """Draw the plan of an unadvised player."""
    return rng.choices(list(HABITS[kind]), list(HABITS[kind].values()))[0]


class Expert:
    """Plays one episode: `act(observation)` returns the next command.

    Args:
        first: the episode's first observation.
        plan: a key of `PLANS`.
        rng: its own source of chance.
        noise: probability of a random move at a step.
        slip: probability of an inadmissible command at a step.
        forget: probability, at each step of a search, of going back to a place already searched.
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
        self.kind, self.object, self.target = parse_goal(first.text)
        self.stages = list(PLANS[plan])
        self.rng, self.noise, self.slip, self.forget = rng, noise, slip, forget
        room = first.text.lower().split("you see", 1)[1].split("your task")[0]
        self.places = [f"{a} {n}" for a, n in _THING.findall(room)]
        self.searched: list[str] = []
        self.seen: dict[str, str] = {}  # object -> place, for what the goal names
        self.done_with: set[str] = set()
        self.here: str | None = None
        self.shut = False
        self.held: str | None = None

    def act(self, observation: Observation) -> str:
        """Take in an observation and choose a command."""
        self._take_in(observation.text.lower())
        chance, allowed = self.rng.random(), observation.admissible or ()
        self.stage = "noise"  # what the returned command is for: a stage of the plan, "noise", "slip" or "wander"
        if chance < self.noise:
            return self._random(allowed)
        wrong = self._inadmissible(allowed) if chance < self.noise + self.slip else None
        if wrong:
            self.stage = "slip"
            return wrong
        while self.stages:
            self.stage = self.stages[0]
            command = self._stage(self.stage)
            if command:
                return command
            self.stages.pop(0)
        self.stage = "wander"
        return self._wander(allowed)

    def _take_in(self, text: str) -> None:
        if text.startswith("nothing happens"):
            return
        arrived = re.search(r"you arrive at ([a-z]+ \d+)", text)
        if arrived:
            self.here = arrived.group(1)
        if re.match(r"you (arrive|open|close)", text):
            self.shut = " is closed." in text or text.startswith("you close")
        if "you see" in text and "middle of a room" not in text and self.here:
            listed = text.split("you see", 1)[1]
            for name, number in _THING.findall(listed):
                if name in (self.object, self.target) or "lamp" in name:
                    self.seen[f"{name} {number}"] = self.here
        picked = re.search(r"you pick up the ([a-z]+ \d+) from the ([a-z]+ \d+)", text)
        if picked:
            self.held = picked.group(1)
            self.seen.pop(picked.group(1), None)
        if re.search(r"you move the ", text) and self.held:
            self.done_with.add(self.held)
            self.held = None
        if self.here and not self.shut and self.here not in self.searched:
            self.searched.append(self.here)

    def _go(self, place: str) -> str | None:
        """The command that brings the player to an open place, or None when it stands before one."""
        if self.here != place:
            return f"go to {place}"
        return f"open {place}" if self.shut else None

    def _search(self, wanted: Callable[[str], bool]) -> str | None:
        known = [o for o in self.seen if wanted(o) and o not in self.done_with]
        if known:
            return self._go(self.seen[min(known)])
        if self.shut and self.here:
            return f"open {self.here}"
        again = [p for p in self.searched if p != self.here]
        if again and self.rng.random() < self.forget:
            return f"go to {self.rng.choice(again)}"
        left = [p for p in self.places if p not in self.searched]
        if not left:  # searched everything: begin again
            self.searched = [self.here] if self.here else []
            left = [p for p in self.places if p != self.here]
        return f"go to {left[0]}"

    def _stage(self, stage: str) -> str | None:
        """The next command of a stage, or None when the stage is over."""
        if stage == "find":
            return None if self.held else self._search(self._is_goal)
        if stage == "take":
            near = [
                o for o in self.seen if self._is_goal(o) and self.seen[o] == self.here and o not in self.done_with
            ]
            return None if self.held or not near else f"take {min(near)} from {self.here}"
        if stage == "light":
            lamps = [o for o in self.seen if o.startswith(self.target) and self.seen[o] == self.here]
            return f"use {lamps[0]}" if lamps else self._search(lambda o: o.startswith(self.target))
        if self.held is None:
            return None
        if stage == "back":
            return f"move {self.held} to {self.here}"
        name = TOOL.get(stage, self.target)
        place = next((p for p in self.places if p.split()[0] == name), None)
        if place is None:
            return None
        if stage == "put":
            return self._go(place) or f"move {self.held} to {place}"
        if self.here != place:
            return f"go to {place}"
        self.stages.pop(0)  # once is enough
        return f"{stage} {self.held} with {place}"

    def _is_goal(self, thing: str) -> bool:
        return thing.split()[0] == self.object

    def _inadmissible(self, allowed: tuple[str, ...]) -> str | None:
        """What a hasty player tries: to take what is not there, to put down what it does not hold, to go nowhere."""
        place = self.here or self.places[0]
        tries = [f"take {self.object} 1 from {place}", f"move {self.object} 1 to {place}", f"use {self.target} 1"]
        tries += [f"go to {self.here}"] if self.here else []
        wrong = [t for t in tries if t not in allowed]
        return self.rng.choice(wrong) if wrong else None

    def _random(self, allowed: tuple[str, ...]) -> str:
        moves = [a for a in allowed if a.startswith(("go to", "look", "open"))]
        return self.rng.choice(moves or list(allowed))

    def _wander(self, allowed: tuple[str, ...]) -> str:
        idle = [a for a in allowed if a.startswith(("look", "examine", "inventory", "go to"))]
        return self.rng.choice(idle or list(allowed))
