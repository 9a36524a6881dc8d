"""The made catalogue: 2,088 products in the format of WebShop's files, and the tasks of the committed panels.

A task's product stands in a family of three that share its title and differ in what its kind of shopping turns on:
whether the colour and size are there (fashion), the price (electronics), or a need that only the features (beauty),
the description (garden) or the reviews (grocery) tell. The one to buy is never the first of its family.
`valid_unseen` has products, product types and pairs of need and option that no other split's tasks have, made of the
same words. `python -m seedkit.envs.webshop_catalogue` writes the panels. Nothing here is taken from a real shop.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from seedkit.envs.base import data_dir, write_panel
from seedkit.envs.webshop_data import instruction, made
from seedkit.types import Task, digest

COUNTS = {"train": 384, "valid_seen": 96, "valid_unseen": 216}
SEED = 7
FILLERS = ("made for every day", "easy to use")


@dataclass(frozen=True)
class Shelf:
    """The words of a kind. Every modifier goes with every head; needs and option values fall into three classes.

    A task has two needs: one of `needs`, which stands in the name of its product, and one of `told`, which does not.
    """

    path: str
    modifiers: tuple[str, ...]
    heads: tuple[str, ...]
    needs: tuple[str, ...]
    told: tuple[str, ...]
    first: tuple[str, tuple[str, ...]]
    second: tuple[str, tuple[str, ...]]
    asked: int
    """How many of its two options a task names."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


BRANDS = _words("Acme Nova Orbit Summit Delta Harbor Meadow Pioneer Willow Falcon Comet Anchor")
CALLS = _words(  # a product's id is one of these and a number: short to copy, easy to tell apart on a page
    "ALPHA BRAVO CHARLIE DELTA ECHO FOXTROT GOLF HOTEL INDIA JULIET KILO LIMA MIKE "
    "OSCAR PAPA QUEBEC ROMEO SIERRA TANGO UNIFORM VICTOR WHISKEY XRAY YANKEE ZULU"
)

SHELVES = {
    "beauty": Shelf(
        "Beauty & Personal Care",
        _words("face hand body hair"),
        _words("cream oil mask wash serum balm scrub lotion"),
        ("cruelty free", "anti aging", "dry skin", "paraben free", "long lasting", "alcohol free"),
        ("fine lines", "dark spots", "sensitive skin", "damaged hair", "ultra light", "travel friendly"),
        ("scent", _words("rose mint lemon vanilla coconut cedar")),
        ("size", _words("mini regular jumbo")),
        1,
    ),
    "electronics": Shelf(
        "Electronics",
        _words("desk studio gaming car"),
        _words("speaker headset keyboard microphone charger camera monitor radio"),
        ("noise cancelling", "fast charging", "water resistant", "high resolution", "hands free", "low power"),
        ("stereo sound", "plug and play", "dust proof", "quick release", "touch control", "voice command"),
        ("color", _words("black white silver blue gold gray")),
        ("plug", _words("us eu uk")),
        2,
    ),
    "fashion": Shelf(
        "Clothing, Shoes & Jewelry",
        _words("trail running rain winter"),
        _words("shoe boot jacket pants sock hat glove vest"),
        ("non slip", "machine washable", "quick drying", "slim fit", "fleece lined", "arch support"),
        ("hidden pocket", "soft lining", "double stitched", "easy zip", "hand made", "odor control"),
        ("color", _words("black white navy red green pink")),
        ("size", _words("small medium large")),
        2,
    ),
    "garden": Shelf(
        "Home & Kitchen",
        _words("office patio kitchen bedroom"),
        _words("table chair shelf bench lamp rug stool cabinet"),
        ("solid wood", "easy assembly", "space saving", "stain resistant", "heavy duty", "eco friendly"),
        ("powder coated", "scratch proof", "mid century", "non toxic", "hand woven", "fully assembled"),
        ("color", _words("walnut white black gray teal oak")),
        ("size", _words("compact narrow wide")),
        1,
    ),
    "grocery": Shelf(
        "Grocery & Gourmet Food",
        _words("breakfast snack protein oat"),
        _words("bar cookie cracker cereal muffin bread granola wafer"),
        ("gluten free", "sugar free", "low sodium", "non gmo", "high fiber", "dairy free"),
        ("low carb", "plant based", "kosher certified", "whole grain", "fair trade", "ready to eat"),
        ("flavor", _words("almond honey maple berry cinnamon ginger")),
        ("pack", _words("single double dozen")),
        1,
    ),
}
KINDS = tuple(SHELVES)


class _Draw:
    """Chance that is the same on every Python: only `random()` is promised to be."""

    def __init__(self, seed: Any) -> None:
        self._random = random.Random(digest(seed)).random

    def one(self, items: Iterable[Any]) -> Any:
        items = list(items)
        return items[int(self._random() * len(items))]

    def order(self, items: Iterable[Any]) -> list[Any]:
        return [item for _, item in sorted(((self._random(), n), item) for n, item in enumerate(items))]


def share(count: int) -> list[int]:
    """Equal shares of a panel for the kinds; the first kinds take what is left over."""
    return [count // len(KINDS) + (n < count % len(KINDS)) for n in range(len(KINDS))]


def unseen_type(shelf: Shelf, modifier: str, head: str) -> bool:
    """Whether tasks for this type of product belong to `valid_unseen` alone."""
    return (shelf.modifiers.index(modifier) + shelf.heads.index(head)) % 4 == 0


def unseen_pair(shelf: Shelf, need: str, value: str) -> bool:
    """Whether only tasks of `valid_unseen` ask for this need and this option value together."""
    values = shelf.first[1] if value in shelf.first[1] else shelf.second[1]
    needs = shelf.needs if need in shelf.needs else shelf.told
    return (needs.index(need) + values.index(value)) % 3 == 0


@functools.cache
def _made(seed: int = SEED) -> tuple[list[dict], dict[str, dict], list[dict], dict[str, list[tuple[str, dict]]]]:
    """Product rows, attribute rows, review rows, and (kind, spec without catalogue) by split."""
    families = []
    for number, (kind, shelf) in enumerate(SHELVES.items()):
        draw = _Draw([seed, kind])
        cells = [(m, h, need) for m in shelf.modifiers for h in shelf.heads for need in shelf.needs]
        seen = draw.order(c for c in cells if not unseen_type(shelf, *c[:2]))
        unseen = draw.order(c for c in cells if unseen_type(shelf, *c[:2]))
        counts = {split: share(count)[number] for split, count in COUNTS.items()}
        splits = {"train": seen, "valid_seen": seen[counts["train"] :], "valid_unseen": unseen}
        for split, free in splits.items():
            families += [(split, kind, cell) for cell in free[: counts[split]]]
    products, attributes, reviews, tasks = [], {}, [], {split: [] for split in COUNTS}
    for split, kind, cell in _Draw([seed, "families"]).order(families):
        rows, goal = _family(kind, cell, split == "valid_unseen", _Draw([seed, kind, cell]))
        asins = [_asin(len(products) + n) for n in range(len(rows))]
        for asin, (row, known, review) in zip(asins, rows, strict=True):
            products.append({"asin": asin, **row})
            attributes[asin] = {"attributes": known}
            reviews.append({"asin": asin, **review})
        tasks[split].append((kind, goal | {"asin": asins[goal["asin"]]}))
    return products, attributes, reviews, tasks


def _asin(n: int) -> str:
    """The id of the n-th product: neighbours get unlike ones."""
    n = n * 1033 % (90 * len(CALLS))  # 1033 has no divisor in common with 2,250
    return f"{CALLS[n % len(CALLS)]}-{10 + n // len(CALLS)}"


def _family(kind: str, cell: tuple[str, str, str], unseen: bool, draw: _Draw) -> tuple[list[tuple], dict[str, Any]]:
    """Three products as (product row, attributes, review row), and the goal, its `asin` the place of its product."""
    shelf, (modifier, head, need) = SHELVES[kind], cell

    def fits(need: str, value: str) -> bool:
        return unseen_pair(shelf, need, value) == unseen

    while True:  # a second need and option values whose pairs all belong to the split
        other = draw.one(shelf.told)
        wanted = {name: draw.one(values) for name, values in (shelf.first, shelf.second)}
        asked = dict(list(wanted.items())[: shelf.asked])
        if all(fits(n, v) for n in (need, other) for v in asked.values()):
            break
    place = draw.one((1, 2))
    level = 10 * (1 + (shelf.modifiers.index(modifier) * 3 + shelf.heads.index(head)) % 4)
    bound = float(level + draw.one((20, 30, 30, 40, 40, 40)))  # the larger of two of the next four multiples of 10
    wrong = draw.order(n for n in shelf.told if n != other)
    brands = draw.order(BRANDS)
    rows = []
    for n in range(3):
        target = n == place
        told = other if target or kind in ("fashion", "electronics") else wrong[n]
        price = level + draw.one(range(1, 9))
        if kind == "electronics" and not target:
            price = int(bound) + draw.one(range(2, 11))
        lacking = draw.one(wanted) if kind == "fashion" and not target else None
        options = {}
        for (name, values), many in ((shelf.first, 3), (shelf.second, 2)):
            rest = draw.order(v for v in values if v != wanted[name])
            kept = rest[:many] if name == lacking else [wanted[name], *rest[: many - 1]]
            options[name] = [{"value": v} for v in values if v in kept]
        row = {
            "name": f"{brands[n]} {need.title()} {modifier.title()} {head.title()}",
            "category": kind,
            "query": f"{modifier} {head}",
            "product_category": f"{shelf.path} › {head.title()} › {modifier.title()} {head.title()}",
            "full_description": f"This {modifier} {head} is {told if kind == 'garden' else FILLERS[0]}.",
            # of features the engine reads the first: a search for the title's need finds its family before others
            "small_description": {"garden": [need, FILLERS[1]], "grocery": list(FILLERS)}.get(
                kind, [FILLERS[1], told]
            ),
            "pricing": f"${price}",
            "customization_options": options,
        }
        said = f"it is {told if kind == 'grocery' else FILLERS[0]}"
        stars = draw.one((3.5, 4.0, 4.5, 5.0))
        review = {"average_rating": stars, "reviews": [{"title": "good", "stars": stars, "review": said}]}
        rows.append((row, [need, told], review))
    return rows, {
        "asin": place,
        "instruction": instruction(f"Find me {modifier} {head}, {need}, {other},", asked, bound),
        "attributes": [need, other],
        "options": asked,
        "price_upper": bound,
    }


def made_rows(seed: int = SEED) -> tuple[list[dict], dict[str, dict], list[dict]]:
    """The made catalogue in the official format: `items_shuffle`, `items_ins_v2` and `reviews`."""
    return _made(seed)[:3]


def made_tasks(split: str, catalogue: str, seed: int = SEED) -> list[Task]:
    """The tasks of a split; `catalogue` is the name of the catalogue that they are played in."""
    tasks = []
    for kind, goal in _made(seed)[3][split]:
        spec = {"catalogue": catalogue, **goal}
        tasks.append(Task(f"{kind}-{digest(spec)}", "webshop", split, kind, spec))
    return tasks


def main() -> None:
    """Write all panels."""
    for split in COUNTS:
        write_panel(data_dir() / "webshop" / f"{split}.jsonl", split, made_tasks(split, made().name))


if __name__ == "__main__":
    main()
