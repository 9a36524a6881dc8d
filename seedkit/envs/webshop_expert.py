"""A shopper with a plan: demonstrations from careful to forgetful.

It sees what a policy sees (text and clicks), searches with the instruction's words, goes through the products whose
names fit, and takes the first that the plan's check does not speak against; of the last one left it takes what comes.
`noise` is the chance of a random move at each step, `slip` that of a command the page does not accept, `forget` that
of leaving out a check or an option. Made for the instructions of the made catalogue.
"""

from __future__ import annotations

import random
import re

from seedkit.envs.webshop_catalogue import SHELVES
from seedkit.envs.webshop_skills import WORKFLOWS, parse_goal, read_results
from seedkit.types import Observation

PLANS = tuple(WORKFLOWS)
_PAGE = {"beauty": "features", "garden": "description", "grocery": "reviews"}  # which page a plan reads
_NEEDS = {need for shelf in SHELVES.values() for need in shelf.told}
# What someone without advice does: mediocre, in the ways people fail at these tasks.
_CARELESS = {
    "first": 0.325,
    "bare": 0.12,
    "beauty": 0.05,
    "electronics": 0.04,
    "fashion": 0.04,
    "garden": 0.05,
    "grocery": 0.05,
}
HABITS = {kind: _CARELESS | {kind: 0.375} for kind in SHELVES}


def habit(kind: str, rng: random.Random) -> str:
    """Draw the plan of an unadvised shopper."""
    return rng.choices(list(HABITS[kind]), list(HABITS[kind].values()))[0]


class Expert:
    """Plays one episode: `act(observation)` returns the next command.

    Args:
        first: the episode's first observation.
        plan: a key of `webshop_skills.WORKFLOWS`.
        rng: its own source of chance.
        noise: probability of a random move at a step.
        slip: probability of an inadmissible command at a step.
        forget: probability of leaving out each check of a product and each option.
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
        if plan not in PLANS:
            raise ValueError(f"no plan {plan!r}; there are {', '.join(PLANS)}")
        self.wish, self.plan, self.rng = parse_goal(first.text), plan, rng
        self.noise, self.slip, self.forget = noise, slip, forget
        need = self.wish.needs[:1]
        self.searches = [
            " ".join([*need, self.wish.query]),
            " ".join([*self.wish.needs, self.wish.query]),
            self.wish.query,
        ]
        self.rejected: set[str] = set()
        self.asin, self.checked, self.left_out = "", False, set[str]()
        self.only = False  # the product is the last of those that fit
        self.page = first.text
        self.stage = "search"  # what the returned command is for: a step of shopping, "noise", "slip" or "wander"

    def act(self, observation: Observation) -> str:
        """Take in an observation and choose a command."""
        if not observation.text.startswith("Nothing happens."):
            self.page = observation.text
        chance = self.rng.random()
        allowed = observation.admissible or ()  # the search page takes any search
        clicks = [a for a in allowed if a != "click[buy now]"]
        if chance < self.noise and clicks:
            self.stage = "noise"
            return self._opened(self.rng.choice(clicks))
        if chance < self.noise + self.slip:
            self.stage = "slip"
            wrong = [
                "click[buy now]",
                "click[next >]",
                "click[search]",
                f"search[{self.wish.query}]",
                "click[features]",
                *(f"click[{value.lower()}]" for value in self.wish.options.values()),
            ]
            wrong = [w for w in wrong if w not in allowed and (clicks or not w.startswith("search"))]
            return self.rng.choice(wrong)
        self.stage, command = self._choose(allowed)
        return self._opened(command)

    def _opened(self, command: str) -> str:
        """Keep in mind which product a click opens."""
        click = command.removeprefix("click[").removesuffix("]")
        if click in read_results(self.page):
            self.asin, self.checked, self.left_out = click, self.rng.random() < self.forget, set()
            self.only = self.only and self.stage == "open"
        return command

    def _choose(self, admissible: tuple[str, ...]) -> tuple[str, str]:
        """(stage, command) by the page."""
        if "click[buy now]" in admissible:
            return self._at_product(admissible)
        if "Instruction:" in self.page:
            query = self.searches.pop(0) if self.searches else self.wish.query
            return "search", f"search[{query}]"
        products = read_results(self.page)
        if products or "Total results: 0" in self.page:
            return self._at_results(products, admissible)
        self.checked = True  # a page about the product
        told = [need for need in _NEEDS if need in self.page.lower()]
        if told and not set(told) & set(self.wish.needs):
            self.rejected.add(self.asin)
        return "read", "click[< prev]"

    def _at_results(self, products: dict[str, tuple[str, float]], admissible: tuple[str, ...]) -> tuple[str, str]:
        named = " ".join([*self.wish.needs[:1], self.wish.query]).lower().split()
        fitting = [a for a, (title, _) in products.items() if set(named) <= set(title.lower().split())]
        left = [a for a in fitting if a not in self.rejected]
        self.only = len(left) == 1 and len(fitting) > 1
        if left:
            return "open", f"click[{left[0]}]"
        if "click[next >]" in admissible and not fitting:
            return "wander", "click[next >]"
        if self.searches or not products:
            return "wander", "click[back to search]"
        return "wander", f"click[{self.rng.choice(list(products))}]"

    def _at_product(self, admissible: tuple[str, ...]) -> tuple[str, str]:
        wanted = [value.lower() for value in self.wish.options.values()]
        missing = any(f"click[{value}]" not in admissible for value in wanted)
        price = re.search(r"^Price: \$([\d.]+)", self.page, re.MULTILINE)
        dear = price is not None and float(price[1]) > self.wish.price
        wrong = {"electronics": dear, "fashion": missing}.get(self.plan, False)
        if wrong and not self.checked and not self.only:
            self.rejected.add(self.asin)
        if self.asin in self.rejected and not self.only:
            return "back", "click[< prev]"
        if self.plan in _PAGE and not self.checked and not self.only:
            return "check", f"click[{_PAGE[self.plan]}]"
        if self.plan != "bare":
            clicked = set(re.findall(r"^You have clicked (.+)\.$", self.page, re.MULTILINE))
            for value in wanted:
                if value in clicked or value in self.left_out or f"click[{value}]" not in admissible:
                    continue
                if self.rng.random() < self.forget:
                    self.left_out.add(value)
                    continue
                return "choose", f"click[{value}]"
        return "buy", "click[buy now]"
