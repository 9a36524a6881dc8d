"""Questions about the embedded corpus, with answers that its facts verify, and the committed panels of them.

`python -m seedkit.envs.search_questions` writes the panels (some seconds). Kinds: `single` (a fact of a thing),
`compare` (which of two things has the larger number) and `hop` (a fact of the country of a thing). Countries, with
all that belongs to them, and elements are either for training or unseen: `valid_seen` asks something else about
names that training asks about, `valid_unseen` is about other countries and elements. No answer occurs twice in all
panels. Leaves out: paraphrases, yes/no questions, chains longer than two.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, combinations, cycle, islice
from typing import Any, NamedTuple

from seedkit.envs.base import data_dir, read_panel, write_panel
from seedkit.envs.search_corpus import Passage, embedded, facts, passage, words
from seedkit.types import Task, digest

KINDS = ("single", "compare", "hop")
COUNTS = {"train": 384, "valid_seen": 96, "valid_unseen": 216}
LABELS = {
    "capital": "capital",
    "currency": "currency",
    "language": "main language",
    "domain": "domain",
    "phone": "phone code",
    "country": "country",
    "code": "code",
    "symbol": "symbol",
    "number": "atomic number",
}
OF_COUNTRY = ("capital", "currency", "language", "domain", "phone")
ASKED = {
    "country": OF_COUNTRY,
    "city": ("country",),
    "currency": ("country", "code"),
    "language": ("country", "code"),
    "element": ("symbol", "number"),
}
# The larger number wins; by at least the factor and the distance.
COMPARED = {
    ("city", "people"): ("Which city has more people", 1.3, 30),
    ("city", "north"): ("Which city lies further north", 1.0, 5),
    ("country", "people"): ("Which country has more people", 1.3, 100),
    ("country", "area"): ("Which country has the larger area", 1.3, 10),
    ("element", "number"): ("Which element has the larger atomic number", 1.0, 3),
    ("element", "melts"): ("Which element melts at more kelvin", 1.2, 20),
    ("element", "boils"): ("Which element boils at more kelvin", 1.2, 20),
}
_PLAIN = re.compile(r"(?=.{3,18}$)[A-Z][a-z]+( [A-Z][a-z]+)?")
_CODE = re.compile(r"[A-Za-z]{1,3}|\d{1,4}")


class Question(NamedTuple):
    """What a question asks: for `field` of the thing (in `hop`: of its country), or which thing has more of it."""

    kind: str
    field: str
    names: tuple[str, ...]


class _Candidate(NamedTuple):
    question: str
    answer: str
    names: tuple[str, ...]  # in the question
    unseen: bool


def parse_question(text: str) -> Question:
    """What a question asks, read off its words in any letter case.

    Raises:
        ValueError: when it is none of ours.
    """
    asked = " ".join(text.split())
    for (_, field), (begin, *_) in COMPARED.items():
        if found := re.fullmatch(rf"{begin}, (.+?) or (.+?)\?", asked, re.IGNORECASE):
            return Question("compare", field, (found[1], found[2]))
    for kind, link in (("hop", "the country of "), ("single", "")):
        for field, label in LABELS.items():
            if found := re.fullmatch(rf"what is the {label} of {link}(?:the )?(.+?)\?", asked, re.IGNORECASE):
                return Question(kind, field, (found[1],))
    raise ValueError(f"no question of the embedded corpus: {asked[:80]!r}")


def questions() -> dict[str, list[Task]]:
    """The tasks of each split, kinds in equal shares, relations in turn within a kind."""
    used: set[str] = set()
    asked: set[str] = set()  # names in training's questions
    panels: dict[str, list[Task]] = {}
    for split, count in COUNTS.items():
        panels[split] = []
        for kind in KINDS:
            pools = [
                [c for c in pool if c.unseen == (split == "valid_unseen")]
                for pool in _candidates(kind, asked if split == "valid_seen" else None)
            ]
            for chosen in islice(_in_turn(pools, used), count // len(KINDS)):
                panels[split].append(_task(chosen, kind, split))
                asked |= set(chosen.names) if split == "train" else set()
    return panels


def training_questions(count: int, seed: int) -> Iterator[Task]:
    """Other questions about training's countries and elements, kinds in turn, none of a committed panel's."""
    rng, env = random.Random(seed), "search"
    asked = {t.spec["question"] for s in COUNTS for t in read_panel(data_dir() / env / f"{s}.jsonl", env)}
    pools = {kind: _training_pools(kind) for kind in KINDS}
    for kind in islice(cycle(KINDS), count):
        chosen = rng.choice(rng.choice(pools[kind]))
        while chosen.question in asked:
            chosen = rng.choice(rng.choice(pools[kind]))
        yield _task(chosen, kind, "train")


def drill(rng: random.Random, kind: str) -> tuple[list[Passage], list[Task]]:
    """Passages of three training things, and all questions of a kind that they answer: no search is needed.

    Args:
        kind: `single`, what the things are like, or `compare`, which of two has more of something.
    """
    asked: list[_Candidate] = []
    while not asked:
        if kind == "compare":
            sort = rng.choice(list(COMPARED))[0]
            chosen = rng.sample(_training_things()[sort], 3)
            for (one, field), rule in COMPARED.items():
                pairs = [list(pair) for pair in combinations(chosen, 2) if all(field in f for f in pair)]
                asked += [c for pair in pairs if one == sort for c in _pairs(pair, field, *rule)]
        else:
            sorts = rng.choices(list(ASKED), [len(fields) for fields in ASKED.values()], k=3)
            chosen = [rng.choice(_training_things()[sort]) for sort in sorts]
            known = [(f, field) for f, sort in zip(chosen, sorts, strict=True) for field in ASKED[sort]]
            asked = [_single(f, field) for f, field in known if _is_answer(f.get(field), f)]
    rng.shuffle(asked)
    return [passage(f) for f in chosen], [_task(c, kind, "train") for c in asked]


@functools.cache
def _training_things() -> dict[str, list[dict[str, Any]]]:
    """What training asks about, by kind of thing."""
    return {one: [f for f in _askable() if f["id"].startswith(f"{one}/") and not _unseen(f)] for one in ASKED}


def _task(chosen: _Candidate, kind: str, split: str) -> Task:
    spec = {"question": chosen.question, "answers": [chosen.answer]}
    return Task(f"{kind}-{digest(chosen.question, 8)}", "search", split, kind, spec)


@functools.cache
def _training_pools(kind: str) -> list[list[_Candidate]]:
    return [found for pool in _candidates(kind, None) if (found := [c for c in pool if not c.unseen])]


def _in_turn(pools: list[list[_Candidate]], used: set[str]) -> Iterator[_Candidate]:
    """The next candidate of each pool in turn whose answer is new, until none is left."""
    queues = [iter(sorted(pool, key=lambda c: digest(c.question))) for pool in pools]
    for queue in cycle(queues):
        new = next((c for c in queue if c.answer.casefold() not in used), None)
        if new is not None:
            used.add(new.answer.casefold())
            yield new
        elif not any(c.answer.casefold() not in used for c in chain(*pools)):
            return


def _candidates(kind: str, only: set[str] | None) -> Iterator[list[_Candidate]]:
    """All candidates of a kind, a list a relation; `only` names what a question may be about."""
    askable = _askable()
    things = {one: [f for f in askable if f["id"].startswith(f"{one}/")] for one in ASKED}
    if only is not None:
        asked = {one: [f for f in found if f["name"] in only] for one, found in things.items()}
    else:
        asked = things
    if kind == "compare":
        for (one, field), rule in COMPARED.items():
            yield list(_pairs([f for f in asked[one] if field in f], field, *rule))
        return
    lands = {f["name"]: f for f in things["country"]}
    for one, fields in ASKED.items():
        if kind == "single":
            for field in fields:
                yield [_single(f, field) for f in asked[one] if _is_answer(f.get(field), f)]
        elif "country" in fields:
            through = [f for f in asked[one] if f.get("country") in lands]
            for field in OF_COUNTRY:
                pairs = [(f, lands[f["country"]]) for f in through if field != one]
                yield [_hop(f, land, field) for f, land in pairs if _is_answer(land.get(field), f)]


def _single(fact: dict[str, Any], field: str) -> _Candidate:
    text = f"What is the {LABELS[field]} of {_the(fact)}?"
    return _Candidate(text, str(fact[field]), (fact["name"],), _unseen(fact))


def _hop(fact: dict[str, Any], land: dict[str, Any], field: str) -> _Candidate:
    text = f"What is the {LABELS[field]} of the country of {_the(fact)}?"
    return _Candidate(text, str(land[field]), (fact["name"],), _unseen(fact))


def _pairs(
    things: list[dict[str, Any]], field: str, begin: str, factor: float, distance: int
) -> Iterator[_Candidate]:
    """Each thing with those that follow it in a fixed shuffled order, where the numbers are clearly apart."""
    order = sorted(things, key=lambda f: digest([field, f["id"]]))
    for step in (1, 2, 3):
        for a, b in zip(order, order[step:], strict=False):
            small, large = sorted((a, b), key=lambda f: f[field])
            apart = large[field] >= factor * small[field] and large[field] - small[field] >= distance
            if apart and _unseen(a) == _unseen(b):
                text, names = f"{begin}, {a['name']} or {b['name']}?", (a["name"], b["name"])
                yield _Candidate(text, large["name"], names, _unseen(a))


@functools.cache
def _askable() -> list[dict[str, Any]]:
    """Facts with a plain name that nothing else has, of one country at most, found first under that name."""
    count = Counter(f["name"].casefold() for f in facts())
    own = [f for f in facts() if count[f["name"].casefold()] == 1 and "countries" not in f]
    plain = [f for f in own if _PLAIN.fullmatch(f["name"])]
    return [f for f in plain if embedded().search(f["name"], 1)[0].passage.id == f["id"]]


def _is_answer(value: Any, asked: dict[str, Any]) -> bool:
    """Whether a value is short and plain, and no word of it stands in the name that the question holds."""
    plain = _PLAIN.fullmatch(str(value)) or _CODE.fullmatch(str(value))
    return value is not None and bool(plain) and not set(words(str(value))) & set(words(asked["name"]))


def _the(fact: dict[str, Any]) -> str:
    return f"the {fact['name']}" if fact["id"].startswith("currency/") else fact["name"]


def _unseen(fact: dict[str, Any]) -> bool:
    """Whether a third of the countries (and what belongs to them) or elements holds this one, kept from training."""
    belongs = fact.get("country", fact["name"])
    return int(digest(["search", belongs], 8), 16) % 3 == 0


def main() -> None:
    """Write all panels."""
    for split, tasks in questions().items():
        write_panel(data_dir() / "search" / f"{split}.jsonl", split, tasks)


if __name__ == "__main__":
    main()
