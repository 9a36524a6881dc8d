"""What shopping skills say: texts for right, wrong and irrelevant advice, and the diagnosis of a finished episode.

A skill is a scope ("To buy something to wear:") and a workflow; hindsight on a failed episode adds the rule that
avoids its failure. The kinds share all but one step, the one that tells the right product from those that look like
it. `diagnose` reads the instructions of the made catalogue, which list what they need, and the pages of `webshop`; of
people's instructions there is no hindsight. Skills name no product.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from seedkit.types import Trajectory

SCOPES = {
    "beauty": "To buy something for skin and hair:",
    "electronics": "To buy an electronic thing:",
    "fashion": "To buy something to wear:",
    "garden": "To buy something for the home:",
    "grocery": "To buy something to eat:",
}
_STEPS = {
    "beauty": "open one, read the features, go back if they name another need, choose the options",
    "electronics": "open one, look at its price, go back if it is too dear, choose the options",
    "fashion": "open one, look at its options, go back if one is missing, choose the options",
    "garden": "open one, read the description, go back if it names another need, choose the options",
    "grocery": "open one, read the reviews, go back if they name another need, choose the options",
    "first": "open the first one, choose the options",
    "bare": "open the first one",
}
WORKFLOWS = {plan: f"search its first need and its name, {steps} and buy it." for plan, steps in _STEPS.items()}
AVOID = {
    "lost": "Do not search for ever, open one.",
    "never": "Do not stop before you buy.",
    "thing": "Do not buy another thing.",
    "price": "Do not pay more than the price.",
    "missing": "Do not buy one that has an option missing.",
    "choose": "Do not buy before you choose the options.",
    "unread": "Do not buy before you read about it.",
    "need": "Do not buy one that lacks a need.",
}
PLACEBOS = (
    "The shop is quiet and the light is good today.",
    "Be kind and stay calm, the day is long.",
    "A good friend is here, and the shop is warm.",
    "It is a good day to be here, stay calm and be happy.",
)
# Plans that fail a kind of task, hence what wrong advice for it may say.
WRONG_PLANS = {kind: tuple(plan for plan in WORKFLOWS if plan != kind) for kind in SCOPES}
_TOLD_BY = {
    "beauty": "read the features",
    "electronics": "look at its price",
    "fashion": "look at its options",
    "garden": "read the description",
    "grocery": "read the reviews",
    "first": "open the first one choose the options",
    "bare": "open the first one and buy",
}
_INSTRUCTION = re.compile(
    r"^Instruction: Find me (?P<query>[^,]+)(?P<needs>(?:, [^,:]+)*), with (?P<options>[^:]+: .+?)"
    r"(?:, and price lower than (?P<price>[\d.]+) dollars)?$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Wish:
    """What an instruction asks for."""

    query: str
    needs: tuple[str, ...]
    options: dict[str, str]
    price: float
    """Dollars; infinite where the instruction names no bound."""


def skill_text(scope: str, workflow: str, avoid: str | None = None) -> str:
    """A shopping skill in words: `scope` is a kind, `workflow` a kind, `first` or `bare`, `avoid` a failure."""
    return " ".join(filter(None, (SCOPES[scope], AVOID.get(avoid or ""), WORKFLOWS[workflow])))


def parse_goal(text: str) -> Wish:
    """What the instruction on a search page asks for.

    Raises:
        ValueError: when the text holds no instruction of the form "Find me NAME, NEED, …, with OPTION: VALUE, and …".
    """
    found = _INSTRUCTION.search(text)
    if not found:
        raise ValueError(f"no instruction of the known form in {text[-80:]!r}")
    needs = tuple(found["needs"].split(", ")[1:])
    options = dict(pair.split(": ", 1) for pair in found["options"].split(", and ") if ": " in pair)
    return Wish(found["query"], needs, options, float(found["price"] or "inf"))


def read_results(text: str) -> dict[str, tuple[str, float]]:
    """Title and (lowest) price in dollars of a results page's products, by id in lower case; none for other pages."""
    if not re.search(r"^Page \d+ \(Total results: \d+\)$", text, re.MULTILINE):
        return {}
    found = re.findall(r"^(\S+) (.+) \$([\d.]+)(?: to \$[\d.]+)?$", text, re.MULTILINE)
    return {asin.lower(): (title, float(price)) for asin, title, price in found}


def named_workflow(text: str) -> str | None:
    """Which workflow a skill's text spells out, or None where it spells out none, or two."""
    words = " ".join(re.findall(r"\w+", text.lower()))
    named = [plan for plan, phrase in _TOLD_BY.items() if re.search(rf"\b{phrase}\b", words)]
    return named[0] if len(named) == 1 else None


def diagnose(trajectory: Trajectory) -> str | None:
    """The failure of an episode as a key of `AVOID`, read off its own turns; None for a success."""
    if trajectory.success:
        return None
    wish = parse_goal(trajectory.turns[0].observation)
    shown: dict[str, tuple[str, float]] = {}
    asin, chosen, read, bought, offered = "", set[str](), False, False, set[str]()
    for turn in trajectory.turns:
        shown |= read_results(turn.observation)
        if not turn.valid:
            continue
        click = turn.action.lower().removeprefix("click[").removesuffix("]")
        allowed = turn.admissible or ()
        if click in shown:
            asin, chosen, read = click, set(), False
        elif f"click[{click}]" in allowed and "click[buy now]" in allowed:  # on a product's page
            offered = {a.removeprefix("click[").removesuffix("]") for a in allowed}
            bought = click == "buy now"
            read = read or click in ("description", "features", "reviews")
            chosen.add(click)
    if not bought:
        return "never" if asin else "lost"
    title, price = shown[asin]
    if not set(wish.query.lower().split()) <= set(title.lower().split()):
        return "thing"
    if price > wish.price:
        return "price"
    wanted = set(wish.options.values())
    if not wanted <= offered:
        return "missing"
    if not wanted <= chosen:
        return "choose"
    return "need" if read else "unread"


def hindsight(trajectory: Trajectory) -> str:
    """The hindsight skill of a finished episode: its kind's workflow, and for a failure the rule that avoids it."""
    kind = trajectory.task.kind
    if kind not in SCOPES:
        raise ValueError(f"no workflow for the kind {kind!r}")
    return skill_text(kind, kind, diagnose(trajectory))
