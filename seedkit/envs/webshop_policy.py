"""What `webshop-tiny` is made of: the words of the made catalogue's pages, and shops of its sort for training.

A training text's brands, product names, needs and option values trade places within their sort: what a shop sells has
to be read. Goals that only `valid_unseen` asks for are drawn again.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seedkit.envs import tiny, webshop_skills
from seedkit.envs.tiny import HEAD, SPECIAL, Organism, Recipe, Text, name_embeddings, repeated, weigh_drill
from seedkit.envs.webshop import PAGE_SIZE, Shop, State, WebShop
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
from seedkit.envs.webshop_skills import AVOID, PLACEBOS, SCOPES, WORKFLOWS, Wish, parse_goal, skill_text
from seedkit.policy import Policy
from seedkit.train import Stage1Config
from seedkit.types import Skill, Task

SHOPS = range(100, 108)
"""Seeds of the catalogues that training shops in."""
NEEDS = tuple(need for shelf in SHELVES.values() for need in (*shelf.needs, *shelf.told))
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
NUMBERS = range(101)
"""Prices in dollars, ratings, counts of results: each a token that knows its size."""
TOLD_ON = {"beauty": "features", "garden": "description", "grocery": "reviews"}
"""Which page tells a second need, where that is what decides."""
WORDS = "after page price rating description features reviews dollars with and this is it search good success failure"


@functools.cache
def _vocabulary() -> tuple[str, list[str], list[str]]:
    """(expression that splits text; words and phrases; what trades places and ends of ids, `##` goes on an id)."""
    phrases = sorted(PHRASES, key=lambda p: (-len(p), p))
    bounds = [(r"\b" * p[0].isalpha(), p, r"\b" * p[-1].isalpha()) for p in phrases]
    pattern = "|".join(begin + re.escape(p) + end for begin, p, end in bounds) + r"|[a-z]+-\d+|\d+|\w+|[^\w\s]"
    told = [*SCOPES.values(), *WORKFLOWS.values(), *AVOID.values(), *PLACEBOS, *PHRASES, *BRANDS, *CALLS, WORDS]
    for shelf in SHELVES.values():
        told += [*shelf.modifiers, *shelf.heads]
        told += [word for option, values in (shelf.first, shelf.second) for word in (option, *values)]
    words = set(re.findall(pattern, " ".join(told).lower())) | set(phrases) | set(".,:;!?()[]$<>'\"{}-")
    words |= {"##-"}
    names = {f"##{n}" for n in range(10, 100)} | {name.lower() for name in (*BRANDS, *CALLS)}
    for shelf in SHELVES.values():
        names |= {*shelf.modifiers, *shelf.heads, *shelf.needs, *shelf.told, *shelf.first[1], *shelf.second[1]}
    return pattern, sorted(words - names), sorted(names)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level, with set phrases; a product's id is a word, a hyphen and a number that go together."""
    pattern, words, names = _vocabulary()
    vocabulary = {w: n for n, w in enumerate([*SPECIAL, *words, *names, *map(str, NUMBERS)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", max_input_chars_per_word=200))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    brackets = [decoders.Replace("[ ", "["), decoders.Replace(" ]", "]")]  # click[buy now], as the shop has it
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece(cleanup=False), decoders.Fuse(), *brackets])
    return tiny.special_tokens(tokenizer)


def embeddings(width: int) -> torch.Tensor:
    """Those of names and of numbers, [count, width]: drawn; one more entry tells how large a number is."""
    names = len(_vocabulary()[2])
    drawn = name_embeddings(names + len(NUMBERS), width)
    drawn[names:, HEAD] = torch.tensor(NUMBERS) / 25 - 2
    return drawn


def reads(ids: Sequence[int]) -> list[bool]:
    """Of pages only names that a text has had before are learnt."""
    return repeated(ids, len(SPECIAL) + len(_vocabulary()[1]))


@functools.cache
def _tasks() -> list[Task]:
    return [task for shop in SHOPS for task in made_tasks("train", made(shop).name, shop)]


def drill(policy: Policy, recipe: Recipe, rng: random.Random) -> Text:
    """Pages and questions that are answered by a look at another place: one thing that shopping needs, many times."""
    task = rng.choice(_tasks())
    shop, wish = _shops()[task.spec["catalogue"]], parse_goal(f"Instruction: {task.spec['instruction']}")
    sort = rng.choice((offered, dear, told, visits, visits))
    said = sort(task, shop, State("results", f"{wish.needs[0]} {wish.query}"), wish, rng)
    skill = Skill(skill_text(task.kind, task.kind)) if sort is visits else None
    return weigh_drill(ORGANISM, policy, said, task, recipe, skill)


Said = list[tuple[str, str]]
"""What the shop says, and the command that answers it."""


def listed_of_kind(task: Task, shop: Shop, results: State) -> list[str]:
    """The products of the task's kind on the first page of results."""
    return [a for a in shop.find(results.query)[:PAGE_SIZE] if shop.products[a].category == task.kind]


def offered(task: Task, shop: Shop, results: State, wish: Wish, rng: random.Random) -> Said:
    """Whether a product has what is wanted: the first wanted value, or back."""
    shelf, asin, said = SHELVES[task.kind], rng.choice(listed_of_kind(task, shop, results)), Said()
    options = shop.products[asin].options
    for n in range(10):
        wanted = {
            name: rng.choice(options[name] if rng.random() < 0.6 else values)
            for name, values in (shelf.first, shelf.second)[: rng.choice((1, 2))]
        }
        there = all(value in options[name] for name, value in wanted.items())
        question = "with " + ", and ".join(f"{name}: {value}" for name, value in wanted.items())
        page = "" if n else f"{shop.page(results._replace(page='item', asin=asin)).text}\n"
        said.append((page + question, f"click[{next(iter(wanted.values())) if there else '< prev'}]"))
    return said


def dear(task: Task, shop: Shop, results: State, wish: Wish, rng: random.Random) -> Said:
    """Whether its price is below a bound: buy it, or back."""
    asin, said = rng.choice(listed_of_kind(task, shop, results)), Said()
    for n in range(10):
        bound = rng.choice(range(10, 101, 10))
        page = "" if n else f"{shop.page(results._replace(page='item', asin=asin)).text}\n"
        right = "buy now" if shop.products[asin].price <= bound else "< prev"
        said.append((f"{page}and price lower than {bound}.00 dollars", f"click[{right}]"))
    return said


def told(task: Task, shop: Shop, results: State, wish: Wish, rng: random.Random) -> Said:
    """Whether what a page tells is among the needs: name it or, in half of the texts, buy; otherwise back."""
    page = shop.page(results._replace(page=TOLD_ON.get(task.kind, "features"), asin=task.spec["asin"])).text
    need_told = next((need for need in wish.needs if need in page), FILLERS[0])
    said, names = Said(), rng.random() < 0.5
    for n in range(10):
        need = wish.needs[1] if rng.random() < 0.4 else rng.choice(SHELVES[task.kind].told)
        right = (need if names else "buy now") if need in wish.needs else "< prev"
        first = "" if n else f"Instruction: {task.spec['instruction']}\n"
        said.append((first + page.replace(need_told, need), f"click[{right}]"))
    return said


def visits(task: Task, shop: Shop, results: State, wish: Wish, rng: random.Random) -> Said:
    """A well-advised episode without its way from product to product: what a page tells of each, and its own page."""
    said = [(f"Instruction: {task.spec['instruction']}\nSearch", f"search[{results.query}]")]
    listed, page = listed_of_kind(task, shop, results), ""
    for asin in [rng.choice((task.spec["asin"], rng.choice(listed))) for _ in range(6)]:
        if task.kind in TOLD_ON:
            page = shop.page(results._replace(page=TOLD_ON[task.kind], asin=asin)).text
            said.append((page, "click[< prev]"))
        item = shop.page(results._replace(page="item", asin=asin))
        offered = [value for value in wish.options.values() if value in item.clicks]
        wrong = {
            "electronics": shop.products[asin].price > wish.price,
            "fashion": len(offered) < len(wish.options),
        }.get(task.kind, not any(need in page for need in wish.needs))
        said.append((item.text, f"click[{'< prev' if wrong else [*offered, 'buy now'][0]}]"))
    return said


def rename(policy: Policy, text: Text, few: bool, rng: random.Random) -> list[int]:
    """The text with brands and ids, and the words of its kind exchanged, each for another of its sort."""
    number = policy.tokenizer.convert_tokens_to_ids
    shelf, spec = SHELVES[text.task.kind], text.task.spec
    sorts = (shelf.modifiers, shelf.heads, shelf.needs, shelf.told, shelf.first[1], shelf.second[1])
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
    while count > 0:
        chosen = rng.sample(_tasks(), min(count, len(_tasks())))
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
    reads=reads,
    drawn=embeddings,
    drill=drill,
    max_steps=15,
    decided=2,
    told=f"""\
**Data.** {len(SHOPS)} catalogues like the one that ships with the kit, drawn from other seeds; none of a committed
panel's tasks, and none of the goals that only `valid_unseen` asks for; before and among the episodes, texts that ask
many times for one thing that shopping needs (`drill`). A quarter of the episodes each: no skill and an irrelevant one
(the player has mediocre habits), the right one (followed), a wrong one (followed).

**Licence.** Apache-2.0, as the repository; the catalogue is made up.""",
    recipe=Recipe(
        drills=12000,
        renamed=1.0,
        steps=3400,
        drill_share=0.2,
        reading_share=0.15,
        reading_weight=1.0,
        few_share=0.0,
        matrix_lr=0.01,
    ),
    stage1=Stage1Config(anchor=10.0, lr=3e-4),  # with 1e-3 play loses five points (LOG.md)
)
