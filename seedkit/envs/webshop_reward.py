"""WebShop's reward: how much of a goal a purchase meets, from 0 to 1.

    r = r_type · (attributes met + options met + [price ≤ bound]) / (attributes + options + 1)

Implements `get_reward` of princeton-nlp/WebShop (arXiv 2207.01206; web_agent_site/engine/goal.py and normalize.py at
commit d149d0d), its flaws included: "large" passes for "x-large", an option's colour is the first of a list that
occurs in it ("tan" in "standard"), and options asked for by name escape that step. Fuzzy matching is thefuzz 0.19's
token set ratio on difflib, as WebShop's requirements install it. Deviates in one place: WebShop counts the words of
product names that spaCy tags as nouns; here `nouns` decides by a rule. On 55 names spaCy's small model and the rule
share 96 % of these words (F1), and 99 % of the pairs of names get the same type score from both
(tests/test_webshop_reward.py measures it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher

from seedkit.envs.webshop_data import Goal, Product

FUZZY = 85  # a token set ratio above this is a match
_COLORS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
wine yellow
"""
COLORS = _COLORS.split()
"""In the order in which WebShop tries them."""
_FUNCTION_WORDS = """
a an the this that these those it its your our my his her their you we he she they and or nor but if as than then so
not no all any both each every more most other some such only very too up down out off over under with without for
from of in on at by to into onto through per via is are be was has have can will do when while after before between
one two three four five six seven eight nine ten first second third
"""
_NOT_NOUNS = frozenset(_FUNCTION_WORDS.split())
_WORD = re.compile(r"[^\W_]+(?:\.[^\W_]+)*")


@dataclass(frozen=True)
class Score:
    """A reward and its parts."""

    reward: float
    """0 to 1; 1 is success."""
    r_type: float
    """1, 0.5, 0.1 or 0."""
    attributes: int
    """Attributes of the goal that are met."""
    options: int
    """Options of the goal that are met."""
    price: bool
    """The price is within the bound."""


def score(product: Product, goal: Goal, chosen: Iterable[str]) -> Score:
    """The reward of buying `product` at its price with the option values `chosen`, for `goal`."""
    r_type = type_score(product, goal)
    attributes = sum(_has_attribute(product, wanted) for wanted in goal.attributes)
    bought = [_color(value) for value in chosen]
    options = sum(any(token_set_ratio(value, wanted) > FUZZY for value in bought) for wanted in _asked(goal))
    price = product.price <= goal.price_upper
    reward = r_type * (attributes + options + price) / (len(goal.attributes) + len(goal.options) + 1)
    return Score(reward, r_type, attributes, options, price)


def type_score(product: Product, goal: Goal) -> float:
    """1 for the right type of product, less the less its name shares with the goal's: 0.5, 0.1, and 0 for nothing."""
    wanted = nouns(goal.name)
    shared = len(set(wanted) & set(nouns(product.title))) / len(wanted) if wanted else 0.2
    if shared < 0.1:
        return 0.1 if shared else 0.0
    steps, other = ({step.strip() for step in p.product_category.split("›")} for p in (product, goal))
    return 1.0 if product.query == goal.query or len(steps & other) >= 2 or shared > 0.2 else 0.5


def nouns(name: str) -> list[str]:
    """The words of a product's name that count as nouns, lower case, in order, repeated as they are.

    Every word does, unless it is a function word or a number, has a digit, or is a single letter; hyphens and slashes
    part words. So small a rule is enough because a tagger takes most of a name in title case, adjectives too, for
    proper nouns.
    """
    words = (w.lower() for w in _WORD.findall(re.sub(r"['’]s?\b", " ", name)))
    return [w for w in words if len(w) > 1 and w not in _NOT_NOUNS and not any(c.isdigit() for c in w)]


def token_set_ratio(one: str, two: str) -> int:
    """Likeness of two texts' sets of words, 0 to 100; 100 where one set holds the other (thefuzz 0.19)."""
    first, second = (set(_words(text)) for text in (one, two))
    if not first or not second:
        return 0
    both = " ".join(sorted(first & second))
    whole = [f"{both} {' '.join(sorted(rest))}".strip() for rest in (first - second, second - first)]
    pairs = ((both, whole[0]), (both, whole[1]), (whole[0], whole[1]))
    return max(round(100 * SequenceMatcher(None, a, b).ratio()) for a, b in pairs)


def _words(text: str) -> list[str]:
    """Lower-case words as thefuzz sees them: Latin-1's upper half dropped, the rest split where no word goes on."""
    return re.sub(r"\W", " ", "".join(c for c in text if not 128 <= ord(c) < 256)).lower().split()


def _color(value: str) -> str:
    return next((color for color in COLORS if color in value), value)


def _asked(goal: Goal) -> list[str]:
    """What the bought values are compared with; an option asked for by name is a colour only if it is just that."""
    if isinstance(goal.options, tuple):
        return [_color(value) for value in goal.options]
    return [next((c for c in COLORS if c in pair), " ".join(pair)) for pair in goal.options.items()]


def _has_attribute(product: Product, wanted: str) -> bool:
    if any(token_set_ratio(known, wanted) > FUZZY for known in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(wanted in text.lower() for text in texts)
