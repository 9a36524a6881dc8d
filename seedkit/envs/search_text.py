"""What is said in a search episode: reading actions, wording observations, judging answers.

Source: the wording of passages is Search-R1's (arXiv 2503.09516); normalisation, exact match and F1 are those of
SQuAD's evaluation (arXiv 1606.05250).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from seedkit.actions import EMPTY, SEVERAL, SEVERAL_LINES, TAG_ORDER
from seedkit.envs.search_corpus import Hit

OPENING = "Use <search>words</search> and <answer>words</answer>.\n\nYour task is to: answer the question: "
NO_TAG = "no search or answer"
TEXT_AROUND = "text around the tags"
MOST_QUESTION, MOST_TITLE, MOST_TEXT = 2000, 200, 1000  # characters
_TAG = re.compile(r"</?(search|answer)>")
_ANY_TAG = re.compile(r"<\s*/?\s*(?:search|answer|information|think|action)\s*>", re.IGNORECASE)


class Said(NamedTuple):
    """An action: "search" or "answer" and its words; or the reason why it is neither."""

    kind: str
    words: str
    reason: str | None = None


def read_action(text: str) -> Said:
    """The one search or answer that a text is: nothing around its tags, one line, not empty."""
    tags = [(tag[0], tag[1]) for tag in _TAG.finditer(text)]
    if not tags:
        return Said("", "", EMPTY if not text.strip() else NO_TAG)
    if sum(not tag.startswith("</") for tag, _ in tags) > 1:
        return Said("", "", SEVERAL)
    if [tag for tag, _ in tags] != [f"<{tags[0][1]}>", f"</{tags[0][1]}>"]:
        return Said("", "", TAG_ORDER)
    before, _, rest = text.partition(tags[0][0])
    words, _, after = rest.partition(tags[1][0])
    if before.strip() or after.strip():
        return Said("", "", TEXT_AROUND)
    if not words.strip():
        return Said("", "", EMPTY)
    if len(words.strip().splitlines()) > 1:
        return Said("", "", SEVERAL_LINES)
    return Said(tags[0][1], " ".join(words.split()))


def normalize(answer: str) -> str:
    """An answer without case, punctuation (ASCII), articles and superfluous white space."""
    bare = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(answer: str, right: Sequence[str]) -> bool:
    """Whether an answer equals one of the right ones after `normalize`."""
    return normalize(answer) in map(normalize, right)


def f1(answer: str, right: Sequence[str]) -> float:
    """The best F1 with one of the right answers, over the words (as a multiset) of both after `normalize`."""

    def one(gold: str) -> float:
        said, words = normalize(answer).split(), normalize(gold).split()
        same = (Counter(said) & Counter(words)).total()
        return 2 * same / (len(said) + len(words)) if said and words else float(said == words)

    return max(map(one, right))


def opening(question: str) -> str:
    """An episode's first observation."""
    return OPENING + one_line(question, MOST_QUESTION)


def information(hits: Sequence[Hit]) -> str:
    """Passages in Search-R1's wording, cut to a length, without line breaks and tags of their own."""
    lines = [
        f"Doc {n}(Title: {one_line(hit.passage.title, MOST_TITLE)}) {one_line(hit.passage.text, MOST_TEXT)}"
        for n, hit in enumerate(hits, 1)
    ]
    return in_tags(lines or ["Nothing found."])


def in_tags(lines: Sequence[str]) -> str:
    """Lines as what a search brought."""
    return "<information>" + "\n".join(lines) + "</information>"


def one_line(text: str, most: int) -> str:
    """Text from outside: one line, printable, at most so many characters, and none of the tags that count here."""
    text = "".join(c if c.isprintable() else " " for c in text[:most])
    while (bare := _ANY_TAG.sub(" ", text)) != text:
        text = bare
    return " ".join(text.split())
