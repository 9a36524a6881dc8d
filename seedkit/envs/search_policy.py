"""What `search-tiny` is made of: the words of questions, passages and skills, and pieces of names.

A name that it has never seen (any of the held-out panel's) can only be copied, out of the question or a passage. So
copying is all it can learn of names: in every training text their pieces are exchanged for others at random.
"""

from __future__ import annotations

import functools
import random
import re
import unicodedata
from collections import Counter
from itertools import product

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seedkit.envs import search_skills, tiny
from seedkit.envs.search import Search
from seedkit.envs.search_corpus import SENTENCES, facts
from seedkit.envs.search_expert import Expert, habit
from seedkit.envs.search_questions import COMPARED, KINDS, LABELS, training_questions
from seedkit.envs.search_skills import AVOID, PLACEBOS, SCOPES, WORKFLOWS
from seedkit.envs.search_text import OPENING
from seedkit.envs.tiny import SPECIAL, Organism, Recipe, Text
from seedkit.policy import Policy

PIECES, LONGEST = 800, 4
"""Pieces that names are made of beside single letters, and letters of the longest."""
FEW = 120
"""Pieces that names are made of in the reading steps, where a text has no more."""
TAGS = [f"<{slash}{tag}>" for tag in ("search", "answer", "information") for slash in ("", "/")]
PHRASES = [
    OPENING,
    *TAGS,
    *(f"doc {n}(title:" for n in (1, 2, 3)),
    *(f"what is the {label} of" for label in LABELS.values()),
    "the country of",
    *(f"{begin}," for begin, *_ in COMPARED.values()),
    *(part for told in SENTENCES.values() for sentence in told for part in re.split(r"{\w+}", sentence)),
    "the answer is right.",
    "the answer is wrong.",
    "nothing happens.",
    "no turn is left.",
    "nothing found.",
    '{"episode_skill": "',
    '"}',
]
WORDS = "or the search this is success failure"


def _plain(text: str) -> str:
    """Lower case, accents gone: as the tokenizer reads."""
    bare = unicodedata.normalize("NFD", text.lower())
    return "".join(c for c in bare if not unicodedata.combining(c)).strip()


@functools.cache
def _vocabulary() -> tuple[str, list[str], list[str]]:
    """(expression that splits text, words and phrases of the templates, pieces of names: `##` goes on a word)."""
    phrases = sorted({p for p in map(_plain, PHRASES) if p and not p.isalnum()}, key=lambda p: (-len(p), p))
    bounds = [(r"\b" * p[0].isalnum(), p, r"\b" * p[-1].isalnum()) for p in phrases]
    pattern = "|".join(begin + re.escape(p) + end for begin, p, end in bounds) + r"|\w+|[^\w\s]"
    told = " ".join([*SCOPES.values(), *WORKFLOWS.values(), *AVOID.values(), *PLACEBOS, *PHRASES, WORDS])
    words = set(re.findall(pattern, _plain(told))) | set(phrases) | set(".,:;!?()'\"{}-")
    words |= {f"{mark}{n}" for n in range(10) for mark in ("", "##")}
    values = [_plain(v) for fact in facts() for v in fact.values() if isinstance(v, str)]
    names = {w for v in values for w in re.findall(r"[^\W\d_]+", v)}
    saved = Counter[str]()  # characters that a piece saves, over all names
    for w in sorted(names):
        for begin, length in product(range(len(w)), range(2, LONGEST + 1)):
            if begin + length <= len(w):
                saved["##" * (begin > 0) + w[begin : begin + length]] += length - 1
    pieces = {piece for piece, _ in sorted(saved.items(), key=lambda found: (-found[1], found[0]))[:PIECES]}
    pieces |= {mark + letter for w in names for letter in w for mark in ("", "##")}
    return pattern, sorted(words), sorted(pieces - words)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Set phrases and words of the templates, a token each; all else in pieces."""
    pattern, words, pieces = _vocabulary()
    vocabulary = {w: n for n, w in enumerate([*SPECIAL, *words, *pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", max_input_chars_per_word=200))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tiny.special_tokens(tokenizer)


def rename(policy: Policy, text: Text, few: bool, rng: random.Random) -> list[int]:
    """The text with the pieces of its names exchanged, each for another of its sort, out of all or of a few."""
    _, words, pieces = _vocabulary()
    first = len(SPECIAL) + len(words)
    going_on = [piece.startswith("##") for piece in pieces]
    swap: dict[int, int] = {}
    for sort in (True, False):
        ids = [first + n for n, goes_on in enumerate(going_on) if goes_on == sort]
        present = sorted(set(text.ids) & set(ids))
        drawn = rng.sample(ids[: max(FEW, len(present))] if few else ids, len(present))
        swap |= zip(present, drawn, strict=True)
    return [swap.get(i, i) for i in text.ids]


ORGANISM = Organism(
    env="search",
    kinds=KINDS,
    vague="single",
    tokenizer=make_tokenizer,
    habit=habit,
    expert=Expert,
    skills=search_skills,
    games=lambda count, seed, easy: training_questions(count, seed),
    play=lambda easy: Search(topk=1 if easy else 3),
    rename=rename,
    max_steps=4,
    decided=2,
    told="""\
**Data.** Questions of `seedkit.envs.search_questions.training_questions` about training's countries and elements,
none of a committed panel's; passages of the embedded corpus, in which the pieces of all names are exchanged at
random. A quarter of the episodes each: no skill and an irrelevant one (the player has mediocre habits), the right one
(followed), a wrong one (followed).

**Licence.** Apache-2.0, as the repository; the sources of the facts are in data/search/README.md.""",
    recipe=Recipe(renamed=1.0),
)
