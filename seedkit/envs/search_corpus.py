"""The passages that can be found, and the index that finds them.

The embedded corpus is written from the facts of data/search/facts.jsonl, one passage a thing; `Index` is BM25
(`bm25s`) over any passages, kept in the cache under a hash of their text. Leaves out: stemming, dense retrieval,
and corpora that do not fit into memory (a server has those, see `search_client`).
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seedkit.envs.base import EnvError, data_dir
from seedkit.envs.bm25 import Bm25
from seedkit.io import DataError, read_jsonl

# What a passage says of a thing, by the thing's kind; a sentence stands only where its fact is known.
SENTENCES = {
    "city": (
        "{name} is a city in {country}.",
        "It has {people} thousand people.",
        "It lies {north} degrees north.",
        "It lies {south} degrees south.",
    ),
    "country": (
        "{name} is a country in {continent}.",
        "Its capital is {capital}.",
        "Its currency is the {currency}.",
        "Its main language is {language}.",
        "Its domain is {domain}.",
        "Its phone code is {phone}.",
        "It has {people} thousand people.",
        "Its area is {area} thousand square km.",
    ),
    "currency": (
        "The {name} is the currency of {country}.",
        "The {name} is used in {countries} countries.",
        "Its code is {code}.",
    ),
    "element": (
        "{name} is a chemical element.",
        "Its symbol is {symbol}.",
        "Its atomic number is {number}.",
        "It melts at {melts} kelvin.",
        "It boils at {boils} kelvin.",
    ),
    "language": (
        "{name} is the main language of {country}.",
        "{name} is spoken most in {countries} countries.",
        "Its code is {code}.",
        "It is written in {script} letters.",
    ),
}
_STOP = frozenset(re.findall(r"\w+", "a an and at in is it its of or that the to what where which who"))
_HOLE = re.compile(r"{(\w+)}")
_SCHEME = 2  # counts up when passages are indexed in another way, so that no old index is used


class Passage(NamedTuple):
    """A document: the first line of its contents is the title."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """As FlashRAG's corpora and the Search-R1 protocol have it."""
        return f"{self.title}\n{self.text}"


class Hit(NamedTuple):
    """A passage that was found, and its score (BM25 here; a server may score otherwise)."""

    passage: Passage
    score: float


@functools.cache
def facts() -> tuple[dict[str, Any], ...]:
    """The rows of facts.jsonl: id ("city/909137"), name, and what is known of the thing."""
    return tuple(rows_of(data_dir() / "search" / "facts.jsonl")[1:])


def passage(fact: dict[str, Any]) -> Passage:
    """A fact row in words."""
    known = (s for s in SENTENCES[fact["id"].split("/")[0]] if all(hole in fact for hole in _HOLE.findall(s)))
    return Passage(fact["id"], fact["name"], " ".join(s.format(**fact) for s in known))


@functools.cache
def _pattern(field: str) -> re.Pattern[str]:
    hole, parts = f"{{{field}}}", []
    for sentence in {s.rsplit("{name}")[-1]: None for told in SENTENCES.values() for s in told if hole in s}:
        parts.append(re.escape(sentence).replace(re.escape(hole), "(.+?)"))
    return re.compile("|".join(parts))


def read_fact(text: str, field: str) -> str | None:
    """The value of a field in a passage's text, or None where it says nothing of it."""
    found = _pattern(field).search(text)
    return next(filter(None, found.groups())) if found else None


def corpus_file(path: Path) -> list[Passage]:
    """The passages of a FlashRAG corpus: rows with `id` and `contents`, whose first line is the title.

    Raises:
        EnvError: naming file, line and field.
    """
    passages = []
    for n, row in enumerate(rows_of(path), 1):
        contents = row.get("contents")
        if not isinstance(row.get("id"), str | int) or not isinstance(contents, str) or not contents.strip():
            raise EnvError(f"{path} line {n}: should hold an 'id' and 'contents' that are text")
        passages.append(as_passage(str(row["id"]), contents))
    if not passages:
        raise EnvError(f"{path}: should hold at least one passage")
    return passages


def as_passage(name: str, contents: str) -> Passage:
    """A document whose contents begin with the title, often in quotes, on a line of its own."""
    title, _, text = contents.strip().partition("\n")
    return Passage(name, title.strip().strip('"'), text.strip() or title.strip())


def words(text: str) -> list[str]:
    """What the index compares: runs of letters or digits, without case, accents and the commonest words."""
    bare = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return [word for word in re.findall(r"\w+", bare) if word not in _STOP]


class Index:
    """BM25 over passages (Lucene's, k1 = 1.2, b = 0.75); words of the title count three times.

    Args:
        passages: at least one.

    Attributes:
        version: a hash of all passages.

    Raises:
        EnvError: when `bm25s` is missing.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = passages
        sha = hashlib.sha256()
        for one in passages:
            sha.update(f"{one.id}\n{one.contents}\n\n".encode("utf-8", "surrogatepass"))
        self.version = sha.hexdigest()[:12]
        key = [self.version, unicodedata.unidata_version, _SCHEME]
        self._bm25 = Bm25(
            lambda: [words(f"{one.title} {one.title} {one.contents}") for one in passages],
            "search",
            key,
            k1=1.2,
            b=0.75,
        )

    def search(self, query: str, topk: int) -> list[Hit]:
        """At most `topk` passages that share a word with the query, the best first; ties in the corpus's order."""
        return [Hit(self.passages[n], score) for n, score in self._bm25.best(words(query), topk)]


@functools.cache
def embedded() -> Index:
    """The index of the embedded corpus."""
    return Index([passage(fact) for fact in facts()])


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file that has to be whole.

    Raises:
        EnvError: naming file and line.
    """
    try:
        rows, torn = read_jsonl(path)
    except OSError as error:
        raise EnvError(f"{path}: cannot be read ({error.strerror})") from error
    except DataError as error:
        raise EnvError(str(error).replace(" row ", " line ", 1)) from error
    if torn is not None:
        raise EnvError(f"{path} line {len(rows) + 1}: should be one JSON object, is {torn[:40]!r}")
    return rows
