"""WebShop's products and goals, from the official files or in their format from the made catalogue.

Implements, for arXiv 2207.01206, what `load_products` and `goal.py` of princeton-nlp/WebShop (commit d149d0d) make of
`items_shuffle*.json` (products), `items_ins_v2*.json` (attributes, synthetic instructions), `items_human_ins.json`
(people's instructions) and `reviews.json`. Goals come from people's instructions where that file is there, else one a
combination of a product's options. Deviates where the original draws unseeded: the price of a product that names a
range, and a goal's price bound, are drawn by a hash. Splits are by hash too, never by position. Leaves out images.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedkit.envs.base import EnvError
from seedkit.types import digest

SPLITS = ("train", "valid_seen", "valid_unseen")
NO_BOUND = 1_000_000.0  # a goal's price bound where the instruction names none
_STRINGS = ("asin", "name", "category", "query", "product_category", "full_description")


@dataclass(frozen=True)
class Product:
    """What the shop shows of a product, and the attributes that only the reward sees."""

    asin: str
    """Its id, in upper case, at most ten characters."""
    category: str
    """beauty, electronics, fashion, garden or grocery: the kind of its tasks."""
    query: str
    """The search under which it was found, lower case."""
    product_category: str
    """Its place in the shop, steps between ›."""
    title: str
    description: str
    bullets: tuple[str, ...]
    """The features page; only the first is searched."""
    attributes: tuple[str, ...]
    price: float
    """Dollars."""
    tag: str
    """The price as the pages show it."""
    options: Mapping[str, tuple[str, ...]]
    """Values by name, lower case."""
    reviews: tuple[str, ...]
    rating: str


@dataclass(frozen=True)
class Goal:
    """What a purchase is measured by."""

    query: str
    name: str
    """Title of the product that the goal was written for."""
    product_category: str
    attributes: tuple[str, ...]
    options: Mapping[str, str] | tuple[str, ...]
    """By name, or values alone where people wrote them."""
    price_upper: float
    """Dollars, more than 0."""


@dataclass(frozen=True)
class Catalogue:
    """Products by id, in the files' order, and the specs of the tasks by split."""

    name: str
    """ "made-…" or "official-…", with a hash of the content."""
    products: dict[str, Product]
    tasks: dict[str, list[dict[str, Any]]]


def clean(text: str) -> str:
    """One line of printable text: what files say goes into observations."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(text.split())


@functools.cache
def made(seed: int | None = None) -> Catalogue:
    """The made catalogue, whose tasks lie in the committed panels, or another one that chance makes of a seed."""
    from seedkit.envs.webshop_catalogue import SEED, made_rows  # here, so that it can also be run with `python -m`

    products, attributes, reviews = made_rows(SEED if seed is None else seed)
    name = f"made-{digest([products, attributes, reviews])}"
    return Catalogue(name, _products(products, attributes, reviews, (name, name, name)), {})


def official_root() -> Path:
    """The folder of WebShop's files, or a clear error."""
    root = os.environ.get("SEEDKIT_WEBSHOP_DATA")
    if not root or not Path(root).expanduser().is_dir():
        raise EnvError(
            "no official WebShop files: set SEEDKIT_WEBSHOP_DATA to the folder with items_shuffle*.json, "
            f"items_ins_v2*.json and items_human_ins.json (it is {root or 'not set'})"
        )
    return Path(root).expanduser()


def official(root: Path) -> Catalogue:
    """The catalogue in a folder of official files; read once for a folder's content. Raises `EnvError`."""
    paths = {"products": _only(root, "items_shuffle*.json"), "attributes": _only(root, "items_ins_v2*.json")}
    paths |= {
        n: p for n, p in (("human", root / "items_human_ins.json"), ("reviews", root / "reviews.json")) if p.exists()
    }
    return _official(tuple((name, path, path.stat().st_mtime_ns) for name, path in paths.items()))


@functools.lru_cache(maxsize=2)
def _official(files: tuple[tuple[str, Path, int], ...]) -> Catalogue:
    content, rows = hashlib.sha256(), {}
    where = {"reviews": "reviews.json"} | {name: path.name for name, path, _ in files}
    for name, path, _ in files:
        data = path.read_bytes()
        content.update(data)
        try:
            rows[name] = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EnvError(f"{path.name}: not a JSON file ({error}); fetch it again") from None
        shape = dict if name in ("attributes", "human") else list
        if not isinstance(rows[name], shape):
            raise EnvError(f"{path.name}: expected a JSON {'object by asin' if shape is dict else 'list'}")
    products = _products(
        rows["products"],
        rows["attributes"],
        rows.get("reviews", []),
        (where["products"], where["attributes"], where["reviews"]),
    )
    name = f"official-{content.hexdigest()[:12]}"
    if "human" in rows:
        goals = _human_goals(products, rows["human"], where["human"])
    else:
        goals = _synthetic_goals(products, rows["attributes"], where["attributes"])
    tasks: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for goal in goals:
        tasks[_split(goal)].append({"catalogue": name, **goal})
    return Catalogue(name, products, tasks)


def _only(root: Path, pattern: str) -> Path:
    found = sorted(root.glob(pattern))
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise EnvError(f"{root}: expected exactly one {pattern}, found {names}")
    return found[0]


def _split(goal: dict[str, Any]) -> str:
    """A tenth of the products, with all their goals, is unseen; a tenth of the other goals is kept for validation."""
    if int(digest(goal["asin"]), 16) % 10 == 0:
        return "valid_unseen"
    return "valid_seen" if int(digest(goal), 16) % 10 == 0 else "train"


def _check(ok: bool, place: str, what: str) -> None:
    if not ok:
        raise EnvError(f"{place}: {what}")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _products(rows: list, attributes: dict, reviews: list, files: tuple[str, str, str]) -> dict[str, Product]:
    """Products by asin. As in the original, a second row of an asin and one of over ten characters are left out."""
    told: dict[str, tuple[tuple[str, ...], str]] = {}
    for n, row in enumerate(reviews, 1):
        place = f"{files[2]} row {n}"
        _check(isinstance(row, dict) and isinstance(row.get("asin"), str), place, "field 'asin' must be a string")
        _check(isinstance(row.get("reviews"), list), place, "field 'reviews' must be a list")
        _check(all(isinstance(r, dict) for r in row["reviews"]), place, "each of 'reviews' must be an object")
        texts = (
            f'"{r.get("title", "")}" {r.get("score", r.get("stars", ""))} {r.get("body", r.get("review", ""))}'
            for r in row["reviews"]
        )
        told[row["asin"]] = tuple(map(clean, texts)), clean(str(row.get("average_rating", "N.A.")))
    products: dict[str, Product] = {}
    for n, row in enumerate(rows, 1):
        place = f"{files[0]} row {n}"
        _check(isinstance(row, dict), place, f"expected an object, got {type(row).__name__}")
        for field in _STRINGS:
            _check(isinstance(row.get(field), str), place, f"field {field!r} must be a string")
        asin = row["asin"]
        if asin == "nan" or len(asin) > 10 or asin in products:
            continue
        _check(re.fullmatch(r"[^\s\[\]]+", asin) is not None, place, "field 'asin' must be one word")
        bullets = row.get("small_description")
        bullets = [bullets] if isinstance(bullets, str) else bullets
        _check(_is_strings(bullets), place, "field 'small_description' must be a string or a list of strings")
        known = attributes.get(asin, {})
        found = known.get("attributes", []) if isinstance(known, dict) else None
        _check(_is_strings(found), f"{files[1]} row {asin!r}", "field 'attributes' must be a list of strings")
        prices = _prices(row.get("pricing"), place)
        products[asin] = Product(
            asin=asin,
            category=row["category"],
            query=clean(row["query"]).lower(),
            product_category=clean(row["product_category"]),
            title=clean(row["name"]),
            description=clean(row["full_description"]),
            bullets=tuple(map(clean, bullets)),
            attributes=tuple(found or ()),
            price=round(prices[0] + (prices[-1] - prices[0]) * int(digest(asin), 16) / 16**12, 2),
            tag=" to ".join(f"${p}" for p in prices),
            options=_options(row.get("customization_options"), place),
            reviews=told.get(asin, ((), ""))[0],
            rating=told.get(asin, ((), "N.A."))[1],
        )
    return products


def _prices(pricing: Any, place: str) -> list[float]:
    """One price, or the two ends of a range, in dollars; 100 where there is none."""
    if not pricing:
        return [100.0]
    found = [re.sub(r"[^\d.]", "", part) for part in pricing.split("$")[1:]] if isinstance(pricing, str) else []
    _check(
        bool(found) and all(re.fullmatch(r"\d+\.?\d*|\.\d+", p) for p in found),
        place,
        "field 'pricing' must be like '$9.99'",
    )
    return [float(p) for p in found[:2]]


def _options(value: Any, place: str) -> dict[str, tuple[str, ...]]:
    what = "field 'customization_options' must map names to lists of objects with a 'value'"
    _check(not value or isinstance(value, dict), place, what)
    options = {}
    for name, contents in (value or {}).items():
        if contents is None:
            continue
        _check(isinstance(contents, list), place, what)
        _check(all(isinstance(c, dict) and isinstance(c.get("value"), str) for c in contents), place, what)
        values = (clean(c["value"].replace("/", " | ")).lower() for c in contents)
        options[clean(name).lower()] = tuple(v for v in values if v)
    return options


def price_bound(price: float, key: Any) -> float:
    """The price that a goal asks to stay under: the larger of two drawn from the next four tens, by `key`."""
    above = [10.0 * n for n in range(1, 100) if 10 * n > price][:4]
    pairs = list(itertools.combinations(above, 2))
    return max(pairs[int(digest(key), 16) % len(pairs)]) if pairs else NO_BOUND


def instruction(text: str, options: Mapping[str, str], price_upper: float) -> str:
    """The sentence of a goal that names its options and price bound, in the original's words."""
    asked = ", and ".join(f"{name}: {value}" for name, value in options.items())
    asked = f"{text} with {asked}" if asked else text
    return asked if price_upper == NO_BOUND else f"{asked}, and price lower than {price_upper:.2f} dollars"


def _human_goals(products: dict[str, Product], rows: dict, file: str) -> Iterator[dict[str, Any]]:
    for asin, told in rows.items():
        _check(isinstance(told, list), f"{file} row {asin!r}", "expected a list of instructions")
        for n, row in enumerate(told, 1):
            place = f"{file} row {asin!r} number {n}"
            _check(isinstance(row, dict), place, f"expected an object, got {type(row).__name__}")
            _check(isinstance(row.get("instruction"), str), place, "field 'instruction' must be a string")
            for field in ("instruction_attributes", "instruction_options"):
                _check(_is_strings(row.get(field)), place, f"field {field!r} must be a list of strings")
            if asin not in products or not row["instruction_attributes"]:
                continue
            goal = {"asin": asin, "attributes": row["instruction_attributes"], "options": row["instruction_options"]}
            text = clean(row["instruction"]).strip(".")
            bound = price_bound(products[asin].price, [goal, text])
            yield goal | {"instruction": instruction(text, {}, bound), "price_upper": bound}


def _synthetic_goals(products: dict[str, Product], rows: dict, file: str) -> Iterator[dict[str, Any]]:
    for asin, row in rows.items():
        if asin not in products or row.get("instruction") is None:
            continue
        place, text, attributes = f"{file} row {asin!r}", row["instruction"], row.get("instruction_attributes")
        _check(isinstance(text, str), place, "field 'instruction' must be a string")
        _check(
            bool(attributes) and _is_strings(attributes), place, "field 'instruction_attributes' must list strings"
        )
        bound = price_bound(products[asin].price, [asin, text])
        names = sorted(products[asin].options)
        for values in itertools.product(*(products[asin].options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            goal = {"asin": asin, "attributes": attributes, "options": options, "price_upper": bound}
            yield goal | {"instruction": instruction(clean(text), options, bound)}
