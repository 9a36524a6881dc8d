"""What `webshop-tiny` is made of: the words of the made catalogue's pages, and shops of its sort for training.

A training text's brands, product names, needs and option values trade places within their sort: what a shop sells has
to be read. Goals that only `valid_unseen` asks for are drawn again.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seedkit.envs import tiny, webshop_skills
from seedkit.envs.tiny import SPECIAL, Organism, Recipe, Text, name_embeddings, repeated
from seedkit.envs.webshop import Shop, WebShop
from seedkit.envs.webshop_catalogue import (
    BRANDS,
    CALLS,
    FILLERS,
    KINDS,
    SHELVES,
    made_tasks,
    unseen_pair,
    unseen_type,
)
from seedkit.envs.webshop_data import made
from seedkit.envs.webshop_expert import Expert, habit
from seedkit.envs.webshop_skills import AVOID, PLACEBOS, SCOPES, WORKFLOWS, parse_goal
from seedkit.policy import Policy
from seedkit.types import Task

SHOPS = range(100, 108)
"""Seeds of the catalogues that training shops in."""
NEEDS = tuple(need for shelf in SHELVES.values() for need in shelf.needs)
PHRASES = (
    *NEEDS,
    *FILLERS,
    "instruction: find me",
    "and price lower than",
    "back to search",
    "< prev",
    "next >",
    "buy now",
    "(total results:",
    "you have clicked",
    "thank you for shopping with us!",
    "your score (min 0.0, max 1.0):",
    "nothing happens.",
    "click[",
    "search[",
    ".00",
    ".0",
    ".5",
    '{"episode_skill": "',
    '"}',
)
WORDS = "page price rating description features reviews dollars with and this is it search good success failure"


@functools.cache
def _vocabulary() -> tuple[str, list[str], list[str]]:
    """(expression that splits text; words and phrases; what trades places, and ends of ids: `##` goes on an id)."""
    phrases = sorted(PHRASES, key=lambda p: (-len(p), p))
    bounds = [(r"\b" * p[0].isalpha(), p, r"\b" * p[-1].isalpha()) for p in phrases]
    pattern = "|".join(begin + re.escape(p) + end for begin, p, end in bounds) + r"|[a-z]+-\d+|\d+|\w+|[^\w\s]"
    told = [*SCOPES.values(), *WORKFLOWS.values(), *AVOID.values(), *PLACEBOS, *PHRASES, *BRANDS, *CALLS, WORDS]
    for shelf in SHELVES.values():
        told += [*shelf.modifiers, *shelf.heads]
        told += [word for option, values in (shelf.first, shelf.second) for word in (option, *values)]
    words = set(re.findall(pattern, " ".join(told).lower())) | set(phrases) | set(".,:;!?()[]$<>'\"{}-")
    words |= {str(n) for n in range(101)} | {"##-"}
    names = {f"##{n}" for n in range(10, 100)} | {name.lower() for name in (*BRANDS, *CALLS)}
    for shelf in SHELVES.values():
        names |= {*shelf.modifiers, *shelf.heads, *shelf.needs, *shelf.first[1], *shelf.second[1]}
    return pattern, sorted(words - names), sorted(names)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level, with set phrases; a product's id is a word, a hyphen and a number that go together."""
    pattern, words, names = _vocabulary()
    vocabulary = {w: n for n, w in enumerate([*SPECIAL, *words, *names])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", max_input_chars_per_word=200))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    brackets = [decoders.Replace("[ ", "["), decoders.Replace(" ]", "]")]  # click[buy now], as the shop has it
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece(cleanup=False), decoders.Fuse(), *brackets])
    return tiny.special_tokens(tokenizer)


def rename(policy: Policy, text: Text, few: bool, rng: random.Random) -> list[int]:
    """The text with brands and ids, and the words of its kind exchanged, each for another of its sort."""
    number = policy.tokenizer.convert_tokens_to_ids
    shelf, spec = SHELVES[text.task.kind], text.task.spec
    sorts = (shelf.modifiers, shelf.heads, shelf.needs, shelf.first[1], shelf.second[1])
    names: dict[str, str] = {}
    modifier, head = parse_goal(f"Instruction: {spec['instruction']}").query.split()
    while True:
        for sort in sorts:
            names |= zip(sort, rng.sample(sort, len(sort)), strict=True)
        wanted = [(names[need], names[value]) for need in spec["attributes"] for value in spec["options"].values()]
        if not unseen_type(shelf, names[modifier], names[head]) and not any(unseen_pair(shelf, *p) for p in wanted):
            break
    called = sorted({name.lower() for name in (*BRANDS, *CALLS)})  # one of them is both
    names |= zip(called, rng.sample(called, len(called)), strict=True)
    swap = {number(old): number(new) for old, new in names.items()}
    return [swap.get(i, i) for i in text.ids]


@functools.cache
def _shops() -> dict[str, Shop]:
    return {(catalogue := made(seed)).name: Shop(catalogue) for seed in SHOPS}


def games(count: int, seed: int, easy: bool) -> Iterator[Task]:
    """Training tasks of other catalogues than the committed panels' one."""
    rng = random.Random(seed)
    tasks = [task for shop in SHOPS for task in made_tasks("train", made(shop).name, shop)]
    while count > 0:
        chosen = rng.sample(tasks, min(count, len(tasks)))
        yield from chosen
        count -= len(chosen)


ORGANISM = Organism(
    env="webshop",
    kinds=KINDS,
    vague="electronics",
    tokenizer=make_tokenizer,
    habit=habit,
    expert=Expert,
    skills=webshop_skills,
    games=games,
    play=lambda easy: WebShop(_shops()),
    rename=rename,
    reads=lambda ids: repeated(ids, len(SPECIAL) + len(_vocabulary()[1])),
    drawn=lambda width: name_embeddings(len(_vocabulary()[2]), width),
    max_steps=15,
    decided=2,
    told=f"""\
**Data.** {len(SHOPS)} catalogues like the one that ships with the kit, drawn from other seeds; none of a committed
panel's tasks, and none of the goals that only `valid_unseen` asks for. A quarter of the episodes each: no skill and
an irrelevant one (the player has mediocre habits), the right one (followed), a wrong one (followed).

**Licence.** Apache-2.0, as the repository; the catalogue is made up.""",
    recipe=Recipe(renamed=1.0, few_share=0.0, reading_weight=1.0, matrix_lr=0.01),
)
