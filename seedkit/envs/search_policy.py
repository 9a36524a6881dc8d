"""What `search-tiny` is made of: the words of questions, passages, skills, and of all names in the corpus; numbers.

What a name stands for is nothing that it should know, least of all for the held-out panel's: the answer stands in a
passage. So it can learn to copy names and nothing else: in every training text their words are exchanged at random,
and numbers are, except where they are compared.
"""

from __future__ import annotations

import functools
import random
import re
import string
import unicodedata
from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seedkit.envs import search_questions, search_skills, tiny
from seedkit.envs.search import Search
from seedkit.envs.search_corpus import SENTENCES, Hit, facts
from seedkit.envs.search_expert import Expert, habit
from seedkit.envs.search_questions import COMPARED, KINDS, LABELS, training_questions
from seedkit.envs.search_skills import AVOID, PLACEBOS, SCOPES, WORKFLOWS
from seedkit.envs.search_text import OPENING, information
from seedkit.envs.tiny import HEAD, SPECIAL, Organism, Recipe, Text, name_embeddings, repeated, weigh_drill
from seedkit.policy import Policy
from seedkit.train import Stage1Config

TAGS = [f"<{slash}{tag}>" for tag in ("search", "answer", "information") for slash in ("", "/")]
ASKED = [*LABELS.values(), "people", "area", "north", "melts at", "boils at"]
"""What is asked for: the same token in a question and in the passage that tells."""
_APART = "|".join([r"{\w+}", *sorted((rf"\b{a}\b" for a in ASKED if a != "country"), key=len, reverse=True)])
PHRASES = [
    OPENING,
    *TAGS,
    *ASKED,
    *(f"doc {n}(title:" for n in (1, 2, 3)),
    "what is the",
    "of the country of",
    *(part for begin, *_ in COMPARED.values() for part in re.split(_APART, begin)),
    *(part for told in SENTENCES.values() for sentence in told for part in re.split(_APART, sentence)),
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
def _vocabulary() -> tuple[str, list[str], list[str], list[int]]:
    """(expression that splits text; words and phrases of the templates, and letters; words of names; numbers)."""
    phrases = sorted({p for p in map(_plain, PHRASES) if not re.fullmatch(r"\w*|\W", p)}, key=lambda p: (-len(p), p))
    bounds = [(r"\b" * p[0].isalnum(), p, r"\b" * p[-1].isalnum()) for p in phrases]
    pattern = "|".join(begin + re.escape(p) + end for begin, p, end in bounds) + r"|\w+|[^\w\s]"
    told = " ".join([*SCOPES.values(), *WORKFLOWS.values(), *AVOID.values(), *PLACEBOS, *PHRASES, WORDS])
    words = set(re.findall(pattern, _plain(told))) | set(phrases) | set(".,:;!?()'\"{}-")
    words |= {f"##{n}" for n in range(10)}
    values = [_plain(str(v)) for fact in facts() for v in fact.values()]
    names = {w for v in values for w in re.findall(r"[^\W\d_]+", v)}
    numbers = {int(v) for v in values if v.isdecimal()} | set(range(10))
    letters = {mark + letter for letter in string.ascii_lowercase for mark in ("", "##")}
    return pattern, sorted(words | letters), sorted(names - words - letters), sorted(numbers)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Set phrases, words of the templates and of names, and numbers, a token each; other words letter by letter."""
    pattern, words, names, numbers = _vocabulary()
    vocabulary = {w: n for n, w in enumerate([*SPECIAL, *words, *names, *map(str, numbers)])}
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


def embeddings(width: int) -> torch.Tensor:
    """Those of names' words and of numbers, [count, width]: drawn; one more entry tells how large a number is."""
    *_, names, numbers = _vocabulary()
    drawn = name_embeddings(len(names) + len(numbers), width)
    drawn[len(names) :, HEAD] = torch.tensor(numbers).add(1).log10() - 3
    return drawn


def reads(ids: Sequence[int]) -> list[bool]:
    """Of passages only names and numbers that a text has had before are learnt."""
    return repeated(ids, _first_name())


def drill(policy: Policy, recipe: Recipe, rng: random.Random) -> Text:
    """Some passages, then one question after another that they answer."""
    passages, asked = search_questions.drill(rng, rng.choice(("single", "compare")))
    said = [(task.spec["question"], f"<answer>{task.spec['answers'][0]}</answer>") for task in asked]
    said[0] = (f"{information([Hit(p, 1.0) for p in passages])} {said[0][0]}", said[0][1])
    return weigh_drill(ORGANISM, policy, said, asked[0], recipe)


def rename(policy: Policy, text: Text, few: bool, rng: random.Random) -> list[int]:
    """The text with the words of its names exchanged for others, out of all; numbers, unless compared."""
    *_, names, numbers = _vocabulary()
    begin = _first_name() + len(names)
    sorts = [range(_first_name(), begin), range(begin, begin + len(numbers))]
    swap: dict[int, int] = {}
    for sort in sorts[: 1 if text.task.kind == "compare" else 2]:
        present = sorted(i for i in set(text.ids) if i in sort)
        swap |= zip(present, rng.sample(sort, len(present)), strict=True)
    return [swap.get(i, i) for i in text.ids]


RECIPE = Recipe(
    drills=6000,
    renamed=1.0,
    steps=2600,
    easy_share=0.2,
    drill_share=0.35,
    reading_share=0.2,
    reading_weight=1.0,
    few_share=0.0,
    matrix_lr=0.01,
)

ORGANISM = Organism(
    env="search",
    kinds=KINDS,
    vague="single",
    tokenizer=make_tokenizer,
    habit=habit,
    expert=Expert,
    skills=search_skills,
    games=lambda count, seed, easy: training_questions(count, seed),
    play=lambda easy: Search(),
    drill=drill,
    rename=rename,
    reads=reads,
    max_steps=4,
    width=128,
    drawn=embeddings,
    decided=2,
    told="""\
**Data.** Questions of `seedkit.envs.search_questions.training_questions` about training's countries and elements,
none of a committed panel's; passages of the embedded corpus, in which the words of all names are exchanged at
random; before and among the episodes, passages with several questions each and no search (`drill`). A quarter of the
episodes each: no skill and an irrelevant one (the player has mediocre habits), the right one (followed), a wrong one
(followed).

**Licence.** Apache-2.0, as the repository; the sources of the facts are in data/search/README.md.""",
    recipe=RECIPE,
    stage1=Stage1Config(anchor=3.0),  # with 0.3 play loses ten points (LOG.md)
)
