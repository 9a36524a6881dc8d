"""What `search-tiny` is made of: the words of questions, passages, skills and of all names in the corpus.

What a name stands for is nothing that it should know, least of all for the held-out panel's: the answer stands in a
passage. So it can learn to copy names and nothing else: in every training text their words are exchanged at random.
"""

from __future__ import annotations

import functools
import random
import re
import string
import unicodedata
from collections.abc import Sequence

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
    """(expression that splits text; words and phrases of the templates, digits and letters; words of names)."""
    phrases = sorted({p for p in map(_plain, PHRASES) if p and not p.isalnum()}, key=lambda p: (-len(p), p))
    bounds = [(r"\b" * p[0].isalnum(), p, r"\b" * p[-1].isalnum()) for p in phrases]
    pattern = "|".join(begin + re.escape(p) + end for begin, p, end in bounds) + r"|\w+|[^\w\s]"
    told = " ".join([*SCOPES.values(), *WORKFLOWS.values(), *AVOID.values(), *PLACEBOS, *PHRASES, WORDS])
    words = set(re.findall(pattern, _plain(told))) | set(phrases) | set(".,:;!?()'\"{}-")
    words |= {f"{mark}{n}" for n in range(10) for mark in ("", "##")}
    values = [_plain(v) for fact in facts() for v in fact.values() if isinstance(v, str)]
    names = {w for v in values for w in re.findall(r"[^\W\d_]+", v)}
    letters = {mark + letter for letter in string.ascii_lowercase for mark in ("", "##")}
    return pattern, sorted(words | letters), sorted(names - words - letters)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Set phrases and words of the templates, and words of names, a token each; other words letter by letter."""
    pattern, words, names = _vocabulary()
    vocabulary = {w: n for n, w in enumerate([*SPECIAL, *words, *names])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", max_input_chars_per_word=200))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tiny.special_tokens(tokenizer)


@functools.cache
def _first_name() -> int:
    return len(SPECIAL) + len(_vocabulary()[1])


def repeated(ids: Sequence[int]) -> list[bool]:
    """Which tokens are words of names that a text has had before: the others cannot be known."""
    known: set[int] = set()
    found = []
    for i in ids:
        found.append(i in known)
        if i >= _first_name():
            known.add(i)
    return found


def rename(policy: Policy, text: Text, few: bool, rng: random.Random) -> list[int]:
    """The text with the words of its names exchanged for others, out of all or of a few."""
    first, count = _first_name(), len(_vocabulary()[2])
    present = sorted({i for i in text.ids if i >= first})
    drawn = rng.sample(range(max(RECIPE.first_names, len(present)) if few else count), len(present))
    swap = {old: first + new for old, new in zip(present, drawn, strict=True)}
    return [swap.get(i, i) for i in text.ids]


RECIPE = Recipe(renamed=1.0, few_share=0.0, reading_share=1.0, reading_weight=1.0)

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
    reads=repeated,
    max_steps=4,
    width=128,
    drawn=len(_vocabulary()[2]),
    decided=2,
    told="""\
**Data.** Questions of `seedkit.envs.search_questions.training_questions` about training's countries and elements,
none of a committed panel's; passages of the embedded corpus, in which the pieces of all names are exchanged at
random. A quarter of the episodes each: no skill and an irrelevant one (the player has mediocre habits), the right one
(followed), a wrong one (followed).

**Licence.** Apache-2.0, as the repository; the sources of the facts are in data/search/README.md.""",
    recipe=RECIPE,
)
