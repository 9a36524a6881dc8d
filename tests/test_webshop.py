"""WebShop in text: pages, commands, search, both catalogues, disjoint panels, the scripted shopper, skills, clear
errors."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seedkit.actions import parse_action
from seedkit.analyzer import RuleAnalyzer, SkillLibrary
from seedkit.envs import EnvError, TextEnv, WebShop, make, panel_hash
from seedkit.envs.base import data_dir
from seedkit.envs.webshop import MAX_STEPS, parse_command
from seedkit.envs.webshop_catalogue import (
    COUNTS,
    KINDS,
    SHELVES,
    made_rows,
    made_tasks,
    share,
    unseen_pair,
    unseen_type,
)
from seedkit.envs.webshop_data import NO_BOUND, Goal, made, official, price_bound
from seedkit.envs.webshop_expert import HABITS, PLANS, Expert, habit
from seedkit.envs.webshop_reward import score, token_set_ratio
from seedkit.envs.webshop_search import Index, terms
from seedkit.envs.webshop_skills import (
    AVOID,
    PLACEBOS,
    SCOPES,
    WORKFLOWS,
    WRONG_PLANS,
    diagnose,
    hindsight,
    named_workflow,
    parse_goal,
    read_results,
    skill_text,
)
from seedkit.types import Observation, Skill, Task, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[1]
SPLITS = tuple(COUNTS)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """Indexes are built by the code under test, not found in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def env():
    return make("webshop")


@pytest.fixture(scope="module")
def panels():
    return {split: make("webshop").panel(split) for split in SPLITS}


def play(env, task, plan, *, seed=0, **faults):
    """An episode of the scripted shopper, as a trajectory."""
    now = env.reset(task)
    player = Expert(now, plan, random.Random(seed), **faults)
    turns = []
    while not now.done and len(turns) < MAX_STEPS:
        command = player.act(now)
        turns.append(Turn(now.text, now.admissible, (), (), (), command, env.accepts(command)))
        now = env.step(command)
    return Trajectory("t", task, tuple(turns), now.success, now.reward, "expert", seed, now.text)


def goal_of(task):
    product = made().products[task.spec["asin"]]
    spec = task.spec
    return Goal(
        product.query,
        product.title,
        product.product_category,
        tuple(spec["attributes"]),
        spec["options"],
        spec["price_upper"],
    )


def one_line(caught):
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


# --- pages and commands, on official files made by hand ------------------------------------------------------------


def products():
    shoe = {
        "asin": "B00SHOE001",
        "name": "Trail Shoe\nfor  Men",
        "category": "fashion",
        "query": " Men's Trail Shoes ",
        "product_category": "Clothing › Shoes › Trail Shoes",
        "full_description": "Made for\x1b wet days.",
        "small_description": ["Rubber sole", "Machine washable"],
        "pricing": "$1,049.50",
        "customization_options": {
            "Color": [{"value": " Navy/White ", "image": None}, {"value": "Red"}],
            "Size": [{"value": "8"}, {"value": "9"}],
            "Gone": None,
        },
        "images": ["x"],
        "brand": "nobody",
    }
    tea = {
        "asin": "B00TEA0001",
        "name": "Green Tea",
        "category": "grocery",
        "query": "tea",
        "product_category": "Grocery › Tea",
        "full_description": "",
        "small_description": "Gluten free",
        "pricing": "$9.99 - $19.99",
        "customization_options": {},
    }
    many = [tea | {"asin": f"B00CUP{n:04}", "name": f"Tea Cup {n}", "pricing": None} for n in range(60)]
    return [shoe, tea, tea | {"asin": "nan"}, shoe, *many]


def attributes():
    return {
        "B00SHOE001": {
            "attributes": ["rubber sole"],
            "instruction": "Find me machine washable men's trail shoes",
            "instruction_attributes": ["machine washable"],
        },
        "B00TEA0001": {"attributes": ["gluten free"], "instruction": None, "instruction_attributes": None},
        "B00CUP0001": {"attributes": []},
    }


def human():
    def told(text, attributes, options):
        return {
            "instruction": text,
            "instruction_attributes": attributes,
            "instruction_options": options,
            "worker_id": "x",
        }

    return {
        "B00SHOE001": [told("i need washable shoes.", ["machine washable"], ["red", "8"]), told("nothing", [], [])],
        "B00TEA0001": [told("i want gluten free tea", ["gluten free"], [])],
        "B00UNKNOWN": [told("i want what is not sold", ["rare"], [])],
    }


def reviews():
    review = {"title": "good", "stars": "5.0", "review": "Holds\nwell"}
    return [{"asin": "B00SHOE001", "average_rating": "4.5", "reviews": [review]}]


FILES = {
    "items_shuffle_1000.json": products,
    "items_ins_v2_1000.json": attributes,
    "items_human_ins.json": human,
    "reviews.json": reviews,
}


def write(folder, **changed):
    """The official files in a folder; `changed`, by the start of a name, replaces one or (None) leaves it out."""
    for name, content in FILES.items():
        key = next((k for k in changed if name.startswith(k)), None)
        rows = content() if key is None else changed[key]
        if rows is not None:
            (folder / name).write_text(rows if isinstance(rows, str) else json.dumps(rows), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDKIT_WEBSHOP_DATA", str(tmp_path))
    return write(tmp_path)


def all_tasks(env):
    return [task for split in SPLITS for task in env.panel(f"official/{split}")]


def shoe_task(env):
    return next(task for task in all_tasks(env) if task.spec["asin"] == "B00SHOE001")


SHOE_PAGE = """Back to Search
< Prev
color: navy | white, red
size: 8, 9
Trail Shoe for Men
Price: $1049.5
Rating: 4.5
Description
Features
Reviews
Buy Now"""


def test_every_page(folder):
    env = make("webshop")
    task = shoe_task(env)
    now = env.reset(task)
    text = "i need washable shoes"
    bound = task.spec["price_upper"]
    assert bound == NO_BOUND and task.spec["instruction"] == text  # nothing to ask for above $990
    assert now == Observation(f"Instruction: {text}\nSearch", None)
    assert env.searches == (
        "search[men's trail shoes]",
        "search[machine washable men's trail shoes]",
        "search[red men's trail shoes]",
        "search[shoes]",
        "search[machine washable]",
    )
    now = env.step("search[trail shoe]")
    assert now.text == "Back to Search\nPage 1 (Total results: 1)\nB00SHOE001 Trail Shoe for Men $1049.5"
    assert now.admissible == ("click[back to search]", "click[b00shoe001]")
    now = env.step("click[B00SHOE001]")
    assert now.text == SHOE_PAGE
    buttons = "back to search;< prev;navy | white;red;8;9;description;features;reviews;buy now"
    assert now.admissible == tuple(f"click[{button}]" for button in buttons.split(";"))
    for page, lines in (
        ("Description", "Made for wet days."),
        ("features", "Rubber sole\nMachine washable"),
        ("reviews", '"good" 5.0 Holds well'),
    ):
        now = env.step(f"click[{page}]")
        assert now == Observation(f"Back to Search\n< Prev\n{lines}", ("click[back to search]", "click[< prev]"))
        assert env.step("click[< prev]").text == SHOE_PAGE
    env.step("click[navy | white]")
    assert env.step("click[8]").text == "You have clicked navy | white.\nYou have clicked 8.\n" + SHOE_PAGE
    # a second value of an option takes the first one's place; other pages do not forget what was chosen
    assert env.step("click[red]").text == "You have clicked 8.\nYou have clicked red.\n" + SHOE_PAGE
    env.step("click[reviews]")
    assert env.step("click[< prev]").text == "You have clicked 8.\nYou have clicked red.\n" + SHOE_PAGE
    now = env.step("click[buy now]")
    assert now == Observation(
        "Thank you for shopping with us!\nYour score (min 0.0, max 1.0): 1.00", (), 1.0, True, True
    )
    with pytest.raises(EnvError, match=r"the episode is over .*reset\(task\)"):
        env.step("click[buy now]")
    assert not env.accepts("click[buy now]")


def test_options_are_forgotten_on_the_way_back(folder):
    env = make("webshop")
    env.reset(shoe_task(env))
    for command in ("search[shoe]", "click[b00shoe001]", "click[red]", "click[8]", "click[< prev]"):
        now = env.step(command)
    assert now.text.startswith("Back to Search\nPage 1")
    assert env.step("click[b00shoe001]").text == SHOE_PAGE
    now = env.step("click[buy now]")  # attribute and price of 1 + 2 + 1
    assert (now.reward, now.success, now.done) == (0.5, False, True)
    assert now.text.endswith("0.50")


def test_fifty_results_on_pages_of_ten(folder):
    env = make("webshop")
    env.reset(shoe_task(env))
    now = env.step("search[tea]")
    seen = []
    for number in range(1, 6):
        assert f"Page {number} (Total results: 50)" in now.text
        assert tuple(click in (now.admissible or ()) for click in ("click[< prev]", "click[next >]")) == (
            number > 1,
            number < 5,
        )
        assert len(read_results(now.text)) == 10
        seen += read_results(now.text)
        now = env.step("click[next >]")
    assert now.text == "Nothing happens."
    assert len(set(seen)) == 50
    assert list(read_results(env.step("click[< prev]").text)) == seen[30:40]
    env.step(f"click[{seen[30]}]")
    assert list(read_results(env.step("click[< prev]").text)) == seen[30:40]  # back on the page one came from


def test_reviews_and_prices_that_are_not_there(folder):
    env = make("webshop")
    env.reset(shoe_task(env))
    env.step("search[cup]")
    now = env.step("click[b00cup0000]")
    assert "Price: $100.0\nRating: N.A." in now.text
    assert env.step("click[reviews]").text.endswith("No reviews found")


def test_what_is_not_accepted_changes_nothing(env, panels):
    rng = random.Random(3)
    for task in panels["valid_seen"][:5]:
        now = env.reset(task)
        for _ in range(40):
            wrong = rng.choice(
                ("", "buy now", "click[]", "click[search]", "click[moon-99]", "search[]", "search", "[x]", "\x00")
            )
            before = env._at
            answer = env.step(wrong)
            assert answer == Observation("Nothing happens.", now.admissible, reason="not admissible")
            assert env._at == before
            now = env.step(rng.choice(now.admissible or env.searches))
            if now.done:
                now = env.reset(task)


def test_only_the_search_page_searches_and_there_anything_goes(env, panels):
    task = panels["train"][0]
    now = env.reset(task)
    assert now.admissible is None and len(env.searches) == 6 and all(a.startswith("search[") for a in env.searches)
    for query in (
        "shoe",
        "no such word",
        "a] [b",
        "\u4e2d\u6587",
        "the of",
        "x" * 10_000,
        "<script>",
        "search[shoe]",
    ):
        env.reset(task)
        assert env.accepts(f"search[{query}]")
        now = env.step(f"search[{query}]")
        assert now.text.startswith("Back to Search\nPage 1 (Total results: ")
        assert not env.accepts(f"search[{query}]")
        assert env.step("search[shoe]").text == "Nothing happens."
    env.reset(task)
    assert env.step("search[zzzz]").text == "Back to Search\nPage 1 (Total results: 0)"
    assert env.step("click[back to search]") == env.reset(task)


def test_clones_shop_on_their_own(env, panels):
    one, two = env.clone(), env.clone()
    first, second = panels["train"][:2]
    a, b = one.reset(first), two.reset(second)
    assert a != b and one._shop is two._shop
    page = one.step(one.searches[1])
    two.step("search[zzzz]")
    assert one._now == page and two._now != page
    assert isinstance(env, TextEnv)
    one.close()
    with pytest.raises(EnvError, match="call reset"):
        one.step("click[back to search]")


@unhurried
@given(st.text(), st.sampled_from(["search", "click", "SEARCH", "Click"]))
def test_commands_read_back(argument, verb):
    words = " ".join("".join(c if c.isprintable() else " " for c in argument).split()).lower()
    found = parse_command(f" {verb} [{argument}]\n")
    assert found == ((verb.lower(), words) if words else None)
    if found:
        assert parse_command(f"{found[0]}[{found[1]}]") == (found[0], " ".join(found[1].lower().split()))


@unhurried
@given(st.text(max_size=60))
def test_anything_else_is_no_command(text):
    found = parse_command(text)
    assert found is None or re.match(r"\s*(search|click)\s*\[", text, re.IGNORECASE) and text.rstrip().endswith("]")
    assert parse_command(f"x{text}") is None or text.startswith(("search", "click"))


# --- search --------------------------------------------------------------------------------------------------------


def test_ranking(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDKIT_CACHE", str(tmp_path))
    index = Index(["red shoes", "blue shoe", "red hat", "a red shoe, red", "glass"])
    assert index.top("red shoe", 10) == [3, 0, 2, 1] or index.top("red shoe", 10)[:2] in ([3, 0], [0, 3])
    assert index.top("shoe", 10)[:2] == [0, 1]  # equal scores keep the order
    assert index.top("shoe", 1) == [0]
    assert index.top("glass of the", 10) == index.top("glasses glass", 10) == [4]
    assert index.top("nothing known", 10) == index.top("", 10) == []
    assert terms("The Shoes, a glass & 12-packs") == ["shoe", "glass", "12", "pack"]


def test_an_index_is_kept_by_its_content(tmp_path, monkeypatch):
    import bm25s

    monkeypatch.setenv("SEEDKIT_CACHE", str(tmp_path))
    made_index = []
    build = bm25s.BM25.index
    monkeypatch.setattr(bm25s.BM25, "index", lambda self, *a, **k: (made_index.append(1), build(self, *a, **k))[1])
    first = Index(["red shoe", "blue hat"]).top("hat", 5)
    assert Index(["red shoe", "blue hat"]).top("hat", 5) == first == [1]
    assert len(made_index) == 1
    assert Index(["red hat", "blue shoe"]).top("hat", 5) == [0]
    assert len(made_index) == 2
    for folder in (tmp_path / "webshop").iterdir():
        (folder / "params.index.json").write_text("{torn")
    assert Index(["red shoe", "blue hat"]).top("hat", 5) == [1]
    assert len(made_index) == 3
    assert len(list((tmp_path / "webshop").iterdir())) == 2  # nothing half is left behind


def test_without_bm25s(env, panels, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    shop = WebShop()
    shop.reset(panels["train"][0])  # only a search needs it
    with pytest.raises(EnvError, match=r"pip install -e \.\[search\]") as caught:
        shop.step(shop.searches[0])
    one_line(caught)


# --- the made catalogue and its panels -----------------------------------------------------------------------------


def test_the_catalogue_is_the_same_everywhere():
    assert made().name == "made-57621d9d486a"  # also in the committed panels: a change needs new panels
    assert len(made().products) == 2088 >= 1000
    started = time.process_time()
    made.__wrapped__()
    assert time.process_time() - started < 3  # the type checks of this suite included


def test_committed_panels(panels):
    for split, count in COUNTS.items():
        tasks = panels[split]
        assert (
            panel_hash(tasks)
            == {
                "train": "a704a210acce",
                "valid_seen": "11bf2d72f4cd",
                "valid_unseen": "b395b4389f60",
            }[split]
        )
        assert tasks == sorted(made_tasks(split, made().name), key=lambda t: t.id)
        assert Counter(t.kind for t in tasks) == dict(zip(KINDS, share(count), strict=True))
        assert max(share(count)) - min(share(count)) <= 1
        assert (data_dir() / "webshop" / f"{split}.jsonl").stat().st_size < 1_000_000
    assert sum(COUNTS.values()) >= 600


def test_a_search_for_the_title_s_need_lists_its_family_first(env, panels):
    """So what is hard is to choose among the three; the one to buy is never the first."""
    places = Counter()
    for task in (task for tasks in panels.values() for task in tasks):
        words = f"{task.spec['attributes'][0]} {goal_of(task).query}"
        listed = list(_results(env, task, words).items())
        assert all(set(words.split()) <= set(title.lower().split()) for _, (title, _) in listed[:3])
        assert not any(set(words.split()) <= set(title.lower().split()) for _, (title, _) in listed[3:])
        places[[asin for asin, _ in listed].index(task.spec["asin"].lower())] += 1
    assert set(places) == {1, 2} and min(places.values()) > 0.4 * places.total()


def test_no_name_tells_what_a_page_is_read_for(panels):
    """So a need that a page tells and the instruction names was met in the instruction alone."""
    for product in made().products.values():
        assert not [need for need in SHELVES[product.category].told if need in product.title.lower()]
    for task in (task for tasks in panels.values() for task in tasks):
        named, read = task.spec["attributes"]
        assert named in SHELVES[task.kind].needs and read in SHELVES[task.kind].told


def pairs(task):
    return {(task.kind, need, value) for need in task.spec["attributes"] for value in task.spec["options"].values()}


def test_unseen_means_other_products_types_and_pairs(panels):
    products = {split: {t.spec["asin"] for t in tasks} for split, tasks in panels.items()}
    texts = {split: {t.spec["instruction"] for t in tasks} for split, tasks in panels.items()}
    types = {split: {made().products[a].query for a in found} for split, found in products.items()}
    asked = {split: set().union(*map(pairs, tasks)) for split, tasks in panels.items()}
    for a, b in (("train", "valid_seen"), ("train", "valid_unseen"), ("valid_seen", "valid_unseen")):
        assert not products[a] & products[b] and not texts[a] & texts[b]
    for known in ("train", "valid_seen"):
        assert not types[known] & types["valid_unseen"]
        assert not asked[known] & asked["valid_unseen"]
    # of 72 pairs with a first option a third is unseen, so of 36 with a second one, which two kinds ask for
    there = {"train": 5 * 48 + 2 * 24, "valid_unseen": 5 * 24 + 2 * 12}
    # a few have no task in their split, by chance
    assert {split: count - len(asked[split]) for split, count in there.items()} == {"train": 3, "valid_unseen": 1}
    assert asked["valid_seen"] - asked["train"] == {("fashion", "odor control", "black")}
    # the same words, though
    words = {split: set(re.findall(r"[a-z]+", " ".join(found))) for split, found in texts.items()}
    assert words["valid_unseen"] <= words["train"]
    for task in panels["valid_unseen"]:
        shelf = SHELVES[task.kind]
        assert unseen_type(shelf, *made().products[task.spec["asin"]].query.split())
        assert all(unseen_pair(shelf, need, value) for _, need, value in pairs(task))


def test_choosing_matters(panels):
    """Of the products named alike one alone is right, and it is never the first."""
    by_query = {}
    for product in made().products.values():
        by_query.setdefault(product.query, []).append(product)
    for task in [t for split in SPLITS for t in panels[split]]:
        goal = goal_of(task)
        alike, right = [], []
        for product in by_query[goal.query]:
            values = {v for found in product.options.values() for v in found}
            if goal.attributes[0] in product.title.lower():
                alike.append(product.asin)
                fits = score(product, goal, set(task.spec["options"].values()) & values).reward == 1
                right += [product.asin] * fits
        assert right == [task.spec["asin"]]
        assert len(alike) == 3 and alike.index(right[0]) > 0
        # and on it every other choice of one option fails
        product = made().products[right[0]]
        for name, wanted in task.spec["options"].items():
            for other in set(product.options[name]) - {wanted}:
                chosen = [*(v for n, v in task.spec["options"].items() if n != name), other]
                assert score(product, goal, chosen).reward < 1


def test_the_words_of_a_shelf_are_told_apart():
    for shelf in SHELVES.values():
        values = [*shelf.first[1], *shelf.second[1]]
        for words in (shelf.needs, values):
            assert all(token_set_ratio(a, b) <= 85 for a in words for b in words if a != b)
    heads = [h for shelf in SHELVES.values() for h in shelf.heads]
    assert len(heads) == len(set(heads))


def test_made_rows_are_official_rows(tmp_path):
    """The made catalogue, written into official files, is read as the same products."""
    rows, known, told = made_rows()
    write(tmp_path, items_shuffle=rows, items_ins=known, items_human={}, reviews=told)
    assert official(tmp_path).products == made().products
    assert all(len(asin) <= 10 for asin in made().products)


# --- the official files --------------------------------------------------------------------------------------------


def test_official_goals_play(folder):
    env = make("webshop")
    tasks = all_tasks(env)
    assert sorted(t.spec["asin"] for t in tasks) == [
        "B00SHOE001",
        "B00TEA0001",
    ]  # one without attributes, one not sold
    tea = next(t for t in tasks if t.kind == "grocery")
    bound = tea.spec["price_upper"]
    assert tea.spec["instruction"] == f"i want gluten free tea, and price lower than {bound:.2f} dollars"
    env.reset(tea)
    env.step("search[green tea]")
    assert "Price: $9.99 to $19.99" in env.step("click[b00tea0001]").text
    assert env.step("click[buy now]").success
    assert 9.99 <= official(folder).products["B00TEA0001"].price <= 19.99
    assert env.grammar(tea) == "text"


def test_goals_of_every_combination_where_people_wrote_none(folder):
    (folder / "items_human_ins.json").unlink()
    tasks = all_tasks(make("webshop"))
    assert {t.spec["instruction"] for t in tasks} == {
        f"Find me machine washable men's trail shoes with color: {color}, and size: {size}"
        for color in ("navy | white", "red")
        for size in "89"
    }
    env = make("webshop")
    for task in tasks:
        env.reset(task)
        for command in ("search[shoe]", "click[b00shoe001]", *(f"click[{v}]" for v in task.spec["options"].values())):
            env.step(command)
        assert env.step("click[buy now]").reward == 1.0


def test_splits_do_not_depend_on_position(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDKIT_WEBSHOP_DATA", str(tmp_path))
    told = [dict(human()["B00TEA0001"][0], instruction=f"i want tea number {n}") for n in range(4)]
    asked = {f"B00CUP{n:04}": told for n in range(60)}

    def goals(rows, order):
        write(tmp_path, items_shuffle=rows, items_human=order)
        found = {
            s: {(t.spec["asin"], t.spec["instruction"]) for t in make("webshop").panel(f"official/{s}")}
            for s in SPLITS
        }
        return found

    before = goals(products(), asked)
    after = goals(products()[::-1], dict(reversed(asked.items())))
    assert before == after and all(before.values())
    assert sum(map(len, before.values())) == 240
    unseen = {asin for asin, _ in before["valid_unseen"]}
    assert not unseen & {asin for s in ("train", "valid_seen") for asin, _ in before[s]}
    assert not before["train"] & before["valid_seen"]
    assert sum(len(v) for k, v in before.items() if k != "train") < 120


def test_price_bounds():
    drawn = Counter(price_bound(25.0, n) for n in range(600))
    assert set(drawn) == {40.0, 50.0, 60.0}  # the larger of two of 30, 40, 50, 60
    assert 60 < drawn[40.0] < 140 and 160 < drawn[50.0] < 240 and 260 < drawn[60.0] < 340
    assert price_bound(30.0, 0) > 40 or price_bound(30.0, 0) == 50.0
    assert price_bound(975.0, 0) == 990.0 and price_bound(985.0, 0) == price_bound(5000.0, 0) == NO_BOUND


def row(field, value, n=0):
    rows = products()[:2]
    rows[n] = {k: v for k, v in rows[n].items() if k != field} | ({} if value is KeyError else {field: value})
    return rows


P, A, H, R = "items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json", "reviews.json"
MALFORMED = [
    ({"items_shuffle": "[{"}, rf"^{P}: not a JSON file"),
    ({"items_shuffle": {}}, rf"^{P}: expected a JSON list"),
    ({"items_shuffle": [*products()[:1], 7]}, rf"^{P} row 2: expected an object, got int"),
    ({"items_shuffle": row("name", None, 1)}, rf"^{P} row 2: field 'name' must be a string"),
    ({"items_shuffle": row("asin", KeyError)}, rf"^{P} row 1: field 'asin' must be a string"),
    ({"items_shuffle": row("asin", "B0 1]")}, rf"^{P} row 1: field 'asin' must be one word"),
    ({"items_shuffle": row("small_description", [1])}, rf"^{P} row 1: field 'small_description' must be"),
    ({"items_shuffle": row("pricing", "9.99")}, rf"^{P} row 1: field 'pricing' must be like"),
    ({"items_shuffle": row("pricing", "$1.2.3")}, rf"^{P} row 1: field 'pricing' must be like"),
    ({"items_shuffle": row("pricing", 9.99)}, rf"^{P} row 1: field 'pricing' must be like"),
    ({"items_shuffle": row("customization_options", [1])}, rf"^{P} row 1: field 'customization_options' must"),
    (
        {"items_shuffle": row("customization_options", {"a": [{"v": 1}]})},
        rf"^{P} row 1: field 'customization_options'",
    ),
    ({"items_ins": []}, rf"^{A}: expected a JSON object by asin"),
    ({"items_ins": {"B00SHOE001": {"attributes": "x"}}}, rf"^{A} row 'B00SHOE001': field 'attributes' must be"),
    ({"items_ins": {"B00SHOE001": 3}}, rf"^{A} row 'B00SHOE001': field 'attributes' must be"),
    ({"items_human": {"B00SHOE001": 3}}, rf"^{H} row 'B00SHOE001': expected a list"),
    ({"items_human": {"B00SHOE001": [3]}}, rf"^{H} row 'B00SHOE001' number 1: expected an object"),
    ({"items_human": {"B00SHOE001": [{}]}}, rf"^{H} row 'B00SHOE001' number 1: field 'instruction' must"),
    (
        {"items_human": {"B00SHOE001": [{"instruction": "x", "instruction_attributes": [1]}]}},
        rf"^{H} row 'B00SHOE001' number 1: field 'instruction_attributes' must",
    ),
    ({"reviews": [[]]}, rf"^{R} row 1: field 'asin' must be a string"),
    ({"reviews": [{"asin": "x", "reviews": 3}]}, rf"^{R} row 1: field 'reviews' must be a list"),
    ({"reviews": [{"asin": "x", "reviews": [3]}]}, rf"^{R} row 1: each of 'reviews' must be an object"),
    (
        {"items_human": None, "items_ins": {"B00SHOE001": {"instruction": 3}}},
        rf"^{A} row 'B00SHOE001': field 'instruction' must be a string",
    ),
    (
        {"items_human": None, "items_ins": {"B00SHOE001": {"instruction": "x", "instruction_attributes": []}}},
        rf"^{A} row 'B00SHOE001': field 'instruction_attributes' must",
    ),
]


@pytest.mark.parametrize(("changed", "message"), MALFORMED)
def test_malformed_files_are_named_with_row_and_field(changed, message, tmp_path):
    with pytest.raises(EnvError, match=message) as caught:
        official(write(tmp_path, **changed))
    one_line(caught)


def test_missing_official_files(env, tmp_path, monkeypatch):
    monkeypatch.delenv("SEEDKIT_WEBSHOP_DATA", raising=False)
    with pytest.raises(EnvError, match="set SEEDKIT_WEBSHOP_DATA to the folder") as caught:
        env.panel("official/train")
    one_line(caught)
    monkeypatch.setenv("SEEDKIT_WEBSHOP_DATA", str(tmp_path))
    with pytest.raises(EnvError, match=r"expected exactly one items_shuffle\*.json, found none"):
        env.panel("official/train")
    write(tmp_path)
    (tmp_path / "items_shuffle.json").write_text("[]")
    with pytest.raises(EnvError, match=r"found items_shuffle.json, items_shuffle_1000.json"):
        env.panel("official/train")
    for split in ("test", "official/test"):
        with pytest.raises(EnvError, match="no split .*; there are train, valid_seen, valid_unseen and official/"):
            env.panel(split)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"catalogue": 3}, "'catalogue' must name a catalogue, got 3"),
        ({"catalogue": "made-0"}, "is of the catalogue made-0, here is made-"),
        ({"asin": "MOON-99"}, "has no beauty product 'MOON-99'"),
        ({"instruction": None}, "'instruction' must be a string, got None"),
        ({"attributes": "soft"}, "'attributes' must be a list of strings, got 'soft'"),
        ({"options": {"size": 3}}, "'options' must be strings, in a list or by name"),
        ({"options": 3}, "'options' must be strings"),
        ({"price_upper": 0}, "'price_upper' must be a number above 0, got 0"),
    ],
)
def test_tasks_that_cannot_be_played(env, panels, change, message):
    task = next(t for t in panels["train"] if t.kind == "beauty")
    with pytest.raises(EnvError, match=message) as caught:
        env.reset(replace(task, spec=task.spec | change))
    assert str(caught.value).startswith(f"task {task.id!r}")
    one_line(caught)
    with pytest.raises(EnvError, match="call reset"):
        env.step("click[back to search]")


def test_tasks_of_another_environment(env, panels):
    with pytest.raises(EnvError, match="belongs to 'household', not to 'webshop'"):
        env.reset(Task("x", "household", "train", "pick", {}))
    with pytest.raises(EnvError, match="has no fashion product"):
        env.reset(replace(next(t for t in panels["train"] if t.kind == "beauty"), kind="fashion"))


# --- the scripted shopper ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_the_careful_shopper_succeeds(split, env, panels):
    played = [play(env, task, task.kind) for task in panels[split]]
    assert sum(t.success for t in played) >= 0.95 * len(played)
    assert all(turn.valid for t in played for turn in t.turns)
    for t in played:  # it says nothing that today's interface, a tuple of commands, does not know
        assert all(parse_action(turn.action, turn.admissible).valid for turn in t.turns)
        assert sum(len(f"{turn.observation} {turn.action}".split()) for turn in t.turns) < 700
        assert diagnose(t) is None and named_workflow(hindsight(t)) == t.task.kind
    assert {len(t.turns) for t in played} <= set(range(4, MAX_STEPS))


def test_random_play_is_far_below(env, panels):
    rng = random.Random(0)
    won = rewards = 0
    for task in panels["valid_unseen"]:
        now, left = env.reset(task), MAX_STEPS
        while not now.done and left:
            now, left = env.step(rng.choice(now.admissible or env.searches)), left - 1
        won, rewards = won + now.success, rewards + now.reward
    assert won <= 0.03 * len(panels["valid_unseen"])
    assert 0.05 < rewards / len(panels["valid_unseen"]) < 0.4


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_plans_fail(kind, env, panels):
    """Advice from WRONG_PLANS must cost the episode, or "wrong skill" would not be wrong."""
    tasks = [t for t in panels["valid_unseen"] if t.kind == kind][:12]
    told = {plan: Counter(diagnose(play(env, task, plan)) for task in tasks) for plan in WRONG_PLANS[kind]}
    for plan, found in told.items():
        expected = {"electronics": {"price"}, "fashion": {"missing"}}.get(
            kind, {"choose"} if plan == "bare" else {"unread", "need"}
        )
        assert set(found) <= expected, plan
    if kind == "beauty":
        assert set(told["garden"]) == {"need"} and set(told["first"]) == {"unread"}  # read another page, or none


def test_faults_cost(env, panels):
    tasks = panels["valid_seen"]
    careless = [play(env, task, habit(task.kind, random.Random(n)), seed=n) for n, task in enumerate(tasks)]
    faulty = [play(env, task, task.kind, seed=n, noise=0.05, slip=0.05, forget=0.15) for n, task in enumerate(tasks)]
    assert 0.2 < sum(t.success for t in careless) / len(tasks) < 0.65
    assert 0.3 < sum(t.success for t in faulty) / len(tasks) < 0.9
    assert any(not turn.valid for t in faulty for turn in t.turns)
    assert {diagnose(t) for t in faulty + careless} >= {None, "choose", "unread", "missing", "price"}
    assert set(HABITS) == set(KINDS) and all(set(h) == set(PLANS) for h in HABITS.values())


def test_the_same_seed_shops_the_same(env, panels):
    def commands(seed):
        return [t.action for t in play(env, panels["train"][5], "beauty", seed=seed, noise=0.5, forget=0.5).turns]

    assert commands(3) == commands(3) != commands(4)


def test_it_sees_what_a_policy_sees(env, panels):
    now = env.reset(panels["train"][0])
    a, b = (Expert(now, "garden", random.Random(0)) for _ in range(2))
    while not now.done:
        command = a.act(now)
        assert b.act(Observation(now.text, now.admissible)) == command
        now = env.step(command)
    with pytest.raises(ValueError, match="no plan 'luck'; there are beauty"):
        Expert(env.reset(panels["train"][0]), "luck", random.Random(0))


# --- skills --------------------------------------------------------------------------------------------------------


def test_skills_name_their_workflow():
    for scope in SCOPES:
        for plan in WORKFLOWS:
            for avoid in (None, *AVOID):
                assert named_workflow(skill_text(scope, plan, avoid)) == plan
    assert all(named_workflow(text) is None for text in (*PLACEBOS, *SCOPES.values(), *AVOID.values(), ""))
    assert named_workflow("read the features, read the reviews") is None
    env = make("webshop")
    task = Task("t", "webshop", "train", "garden", {})
    assert env.names_workflow(task, Skill(skill_text("garden", "garden")))
    assert not env.names_workflow(task, Skill(skill_text("garden", "first")))


def test_the_library_is_these_skills(panels):
    library = SkillLibrary(data_dir() / "skills" / "webshop")
    assert {kind: text for kind, (_, text) in library.skills().items()} == {
        kind: skill_text(kind, kind) for kind in KINDS
    }
    env = make("webshop")
    for task in panels["valid_seen"]:  # by its words alone
        assert library.find("", env.reset(task).text).episode == skill_text(task.kind, task.kind)


def test_skills_name_no_product_and_few_words(panels):
    skills = " ".join([*SCOPES.values(), *WORKFLOWS.values(), *AVOID.values(), *PLACEBOS]).lower()
    words = set(re.findall(r"[a-z]+", skills))
    assert not words & {head for shelf in SHELVES.values() for head in shelf.heads}
    env = make("webshop")
    seen = Counter()
    for task in panels["train"][::3]:
        for turn in play(env, task, task.kind).turns:
            seen.update(re.findall(r"\w+|[^\w\s]", f"{turn.observation} {turn.action}".lower()))
    assert len(set(seen) | words) <= 600


def trajectory(env, task, commands):
    turns, now = [], env.reset(task)
    for command in commands:
        turns.append(Turn(now.text, now.admissible, (), (), (), command, env.accepts(command)))
        now = env.step(command)
    return Trajectory("t", task, tuple(turns), now.success, now.reward, "user", 0, now.text)


def test_diagnoses(env, panels):
    task = next(t for t in panels["train"] if t.kind == "fashion" and "glove" not in t.spec["instruction"])
    right = task.spec["asin"].lower()
    family = [f"click[{p.asin.lower()}]" for p in made().products.values() if p.query == goal_of(task).query]
    first, color, size = (
        f"search[{goal_of(task).attributes[0]} {goal_of(task).query}]",
        *task.spec["options"].values(),
    )
    opened = [first, f"click[{right}]"]
    buy = "click[buy now]"
    thing = next(iter(_results(env, task, "glove")))
    for commands, told in (
        ([first], "lost"),
        ([first, buy, "nonsense"], "lost"),
        (opened, "never"),
        ([*opened, buy], "choose"),
        ([*opened, f"click[{color}]", buy], "choose"),
        ([*opened, f"click[{color}]", "click[< prev]", f"click[{right}]", f"click[{size}]", buy], "choose"),
        ([*opened, f"click[{color}]", f"click[{size}]", buy], None),
        (["search[glove]", f"click[{thing}]", buy], "thing"),
    ):
        episode = trajectory(env, task, commands)
        assert diagnose(episode) == told, commands
        text = hindsight(episode)
        assert named_workflow(text) == "fashion" and (told is None or AVOID[told] in text)
    assert f"click[{right}]" in family


def _results(env, task, query):
    env.reset(task)
    return read_results(env.step(f"search[{query}]").text)


def test_instructions_read_back(panels):
    for task in [t for split in SPLITS for t in panels[split]]:
        goal, wish = goal_of(task), parse_goal(f"Instruction: {task.spec['instruction']}\nSearch")
        assert (wish.query, wish.needs, wish.options, wish.price) == (
            goal.query,
            goal.attributes,
            goal.options,
            goal.price_upper,
        )
    assert parse_goal("Instruction: Find me oat bar, soft, with size: mini").price == float("inf")


def test_no_hindsight_on_peoples_words(folder):
    """What the rule cannot read gets a reason, not a wrong skill."""
    env = make("webshop")
    episode = trajectory(env, shoe_task(env), ["search[shoe]", "click[b00shoe001]", "click[buy now]"])
    (skill,) = RuleAnalyzer(hindsight).write_skills([episode])
    assert not skill.ok and "no instruction of the known form" in (skill.reason or "")
    strange = replace(episode, success=True, task=replace(episode.task, kind="toys"))
    assert RuleAnalyzer(hindsight).write_skills([strange])[0].reason == "rule: no workflow for the kind 'toys'"


# --- speed ---------------------------------------------------------------------------------------------------------


def test_steps_a_second(env, panels):
    """At least 2,000, on new pages too; processor time, so that a busy machine does not matter."""
    walks = [(t, [turn.action for turn in play(env, t, t.kind).turns]) for t in panels["train"][:120]]
    fresh = make("webshop")
    fresh.reset(walks[0][0])
    fresh.step("search[shoe]")
    started, steps = time.process_time(), 0
    for task, commands in walks:
        fresh.reset(task)
        for command in commands:
            fresh.step(command)
            steps += 1
    assert steps / (time.process_time() - started) >= 2000


def test_the_command_writes_the_panels(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "seedkit.envs.webshop_catalogue"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"SEEDKIT_DATA": str(tmp_path)})
    for split in SPLITS:
        name = f"webshop/{split}.jsonl"
        assert (tmp_path / name).read_bytes() == (ROOT / "data" / name).read_bytes()
