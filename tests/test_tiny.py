"""The organisms' words, demonstrations and renamings: a policy is trained on what it will meet, and on no more."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seedkit.actions import parse_action
from seedkit.analyzer import RuleAnalyzer
from seedkit.envs import make
from seedkit.envs.search_corpus import read_fact
from seedkit.envs.search_questions import drill, parse_question
from seedkit.envs.tiny import CONDITIONS, HEAD, Recipe, demonstrations, make_policy, organism, train, weigh
from seedkit.envs.webshop import Shop, State
from seedkit.envs.webshop_catalogue import SHELVES, unseen_pair, unseen_type
from seedkit.envs.webshop_data import made as made_catalogue
from seedkit.envs.webshop_policy import SHOPS, dear, offered, told, visits
from seedkit.envs.webshop_skills import parse_goal
from seedkit.train import Stage1Config, stage1

NAMES = ("household", "search", "webshop")
UNKNOWN = 1


@pytest.fixture(scope="module", params=NAMES)
def made(request):
    return organism(request.param)


@pytest.fixture(scope="module")
def shown(made):
    """(policy, demonstrations) of 60 tasks, under four conditions each."""
    policy = make_policy(made)
    shows = demonstrations(made, policy, made.play(False), made.games(60, 5, False), 240, 5)
    return policy, list(shows)


def test_every_word_is_known(shown):
    policy, shows = shown
    for show in shows:
        for turn in show.trajectory.turns:
            assert UNKNOWN not in policy.encode(turn.observation), turn.observation
            assert UNKNOWN not in turn.response_ids, turn.action
        assert UNKNOWN not in policy.encode(show.trajectory.skill.episode if show.trajectory.skill else "")
        assert UNKNOWN not in policy.encode(show.trajectory.final_observation)


def test_a_command_means_the_same_in_its_tokens(made, shown):
    """Decoded commands, as a rollout reads them, go as the player's own did."""
    policy, shows = shown
    env = made.play(False)
    for show in shows[:24]:
        trajectory = show.trajectory
        env.reset(trajectory.task)
        for turn, text in zip(trajectory.turns, [*(t.observation for t in trajectory.turns[1:]), ""], strict=True):
            read = parse_action(policy.decode(turn.response_ids), turn.admissible)
            assert not turn.valid or read.valid, read
            after = env.step(read.text if turn.valid else turn.action)
            assert not text or after.text == text, turn.action
        assert after.text == trajectory.final_observation and after.success == trajectory.success


def test_the_right_skill_is_followed_and_a_wrong_one_too(shown):
    _, shows = shown
    won = {c: [s.trajectory.success for s in shows[n::4]] for n, c in enumerate(CONDITIONS)}
    share = {c: sum(successes) / len(successes) for c, successes in won.items()}
    assert share["right"] >= 0.75 and share["wrong"] <= 0.2, share
    assert share["right"] - 0.25 >= (share["none"] + share["irrelevant"]) / 2 >= 0.1, share  # habits, both
    for n, show in enumerate(shows):
        assert (show.trajectory.skill is None) == (CONDITIONS[n % 4] == "none")


def test_training_tasks_are_none_of_a_panel(made):
    env = make(made.env)
    panels = {
        str(sorted(t.spec.items(), key=str)) for s in ("train", "valid_seen", "valid_unseen") for t in env.panel(s)
    }
    tasks = list(made.games(200, 9, False))
    assert len(tasks) == 200 and {t.kind for t in tasks} == set(made.kinds)
    assert not panels & {str(sorted(t.spec.items(), key=str)) for t in tasks}
    assert [t.id for t in made.games(20, 9, False)] == [t.id for t in made.games(20, 9, False)]


@pytest.mark.parametrize("few", [False, True])
def test_renamed_texts_differ_in_names_alone(made, shown, few):
    policy, shows = shown
    rng = random.Random(1)
    changed = 0
    for show in shows:
        text = weigh(made, policy, show, made.recipe)
        assert len(text.weights) == len(text.ids)
        renamed = made.rename(policy, text, few, rng)
        pairs = set(zip(text.ids, renamed, strict=True))
        assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)  # one name, one other
        kept = {a for a, b in pairs if a == b}
        assert {policy.end_id, *policy.encode("."), *policy.encode(made.skills.PLACEBOS[0])} & set(text.ids) <= kept
        changed += len(pairs) - len(kept)
    assert changed > 2 * len(shows)


def test_questions_for_training_are_about_training_s_names():
    unseen = {name for t in make("search").panel("valid_unseen") for name in parse_question(t.spec["question"]).names}
    for task in organism("search").games(300, 4, False):
        assert not unseen & set(parse_question(task.spec["question"]).names)


@pytest.mark.parametrize("kind", ["single", "compare"])
def test_a_drill_is_answered_by_its_passages(kind):
    unseen = {name for t in make("search").panel("valid_unseen") for name in parse_question(t.spec["question"]).names}
    fields = set()
    for seed in range(60):
        passages, asked = drill(random.Random(seed), kind)
        told = {p.title: p.text for p in passages}
        assert len(told) == len(passages) == 3 and asked and not unseen & set(told)
        assert len({t.spec["question"] for t in asked}) == len(asked)
        for task in asked:
            question, (answer,) = parse_question(task.spec["question"]), task.spec["answers"]
            found = [read_fact(told[name], question.field) or "" for name in question.names]
            if kind == "compare":
                found = [max(zip(map(int, found), question.names, strict=True))[1]]
            assert answer == found[0]
            fields.add(question.field)
    assert len(fields) >= 5


@pytest.fixture(params=range(8))
def shopping(request):
    """What a drill is given: a task, its shop, the page of results, the wish, chance."""
    (task,) = organism("webshop").games(1, request.param, False)
    wish = parse_goal("Instruction: " + task.spec["instruction"])
    shop = Shop(next(c for c in map(made_catalogue, SHOPS) if c.name == task.spec["catalogue"]))
    return task, shop, State("results", f"{wish.needs[0]} {wish.query}"), wish, random.Random(request.param)


def test_a_drill_asks_for_options_and_prices(shopping):
    shelf = SHELVES[shopping[0].kind]
    values, backs = {*shelf.first[1], *shelf.second[1]}, 0
    for drilled in (offered, dear):
        said = drilled(*shopping)
        page = said[0][0].rpartition("\n")[0]
        has, price = set(re.findall(r"\w+", page)) & values, float(re.search(r"Price: \$([\d.]+)", page)[1])  # type: ignore[index]
        for text, command in said:
            question = text.splitlines()[-1]
            wanted = [word for word in re.findall(r"\w+", question) if word in values]
            if drilled is offered:
                right = wanted[0] if set(wanted) <= has else "< prev"
            else:
                right = "buy now" if float(re.search(r"[\d.]+", question)[0]) >= price else "< prev"  # type: ignore[index]
            assert command == f"click[{right}]", text
            backs += right == "< prev"
    assert 0 < backs < 20


def test_a_drill_asks_what_a_page_tells(shopping):
    task, said = shopping[0], told(*shopping)
    wanted = task.spec["attributes"]
    for text, command in said:
        (need,) = [
            n for n in SHELVES[task.kind].told if n in text.removeprefix(f"Instruction: {task.spec['instruction']}\n")
        ]
        assert command in ((f"click[{need}]", "click[buy now]") if need in wanted else ("click[< prev]",)), text
    assert {command == "click[< prev]" for _, command in said} == {True, False}


def test_a_drill_visits_products(shopping):
    """And answers as the kind's own plan does: by what a page tells, by the options, by the price."""
    (task, shop, *_), (search, *said) = shopping, visits(*shopping)
    assert search[0].endswith("Search") and search[1] == f"search[{shopping[2].query}]"
    page, met = "", 0
    for text, command in said:
        if "Buy Now" not in text:
            assert command == "click[< prev]" and not page
            page = text
            continue
        asin = next(a for a, p in shop.products.items() if f"\n{p.title}\n" in text and f"Price: {p.tag}\n" in text)
        wanted, product = list(task.spec["options"].values()), shop.products[asin]
        here = [v for v in wanted if v in sum(product.options.values(), ())]
        wrong = {"electronics": product.price > task.spec["price_upper"], "fashion": here != wanted}
        back = wrong.get(task.kind, not any(n in page for n in task.spec["attributes"]))
        assert command == f"click[{'< prev' if back else [*here, 'buy now'][0]}]", (page, text)
        assert bool(page) == (task.kind not in wrong)
        page, met = "", met + 1
    assert met == 6 and not page


@pytest.mark.parametrize(("env", "begin"), [("search", "<answer>"), ("webshop", "click[")])
def test_a_drill_s_text_weighs_its_answers(env, begin):
    made = organism(env)
    policy, rng = make_policy(made), random.Random(0)
    for _ in range(60):
        assert made.drill
        text = made.drill(policy, made.recipe, rng)
        assert UNKNOWN not in text.ids and len(text.ids) == len(text.weights) <= 512
        learnt = [i for i, w in zip(text.ids, text.weights, strict=True) if w]
        assert policy.decode(learnt).count(begin) == policy.decode(text.ids).count(begin) >= 1
        assert sum(w == made.recipe.verb_weight for w in text.weights) == 2 * learnt.count(policy.end_id)
        if env == "webshop":
            continue
        compared = text.task.kind == "compare"
        numbers = [
            {i for i in ids if policy.decode([i]).isdecimal()}
            for ids in (text.ids, made.rename(policy, text, False, rng))
        ]
        assert (numbers[0] == numbers[1]) == (compared or not numbers[0])


def test_a_number_s_embedding_tells_how_large_it_is():
    """And stays: names and numbers are drawn, not learnt."""
    made = organism("search")
    policy = make_policy(made)
    numbers = [7, 49, 880, 4404, 161356]
    ids = [policy.encode(str(n)) for n in numbers]
    assert all(len(i) == 1 for i in ids)
    weight = policy.model.get_input_embeddings().weight
    sizes = [float(weight[i[0], HEAD].detach()) for i in ids]
    assert sizes == sorted(sizes) and sizes[-1] - sizes[0] > 3
    trained = train("search", Recipe(easy=24, full=24, steps=4, batch_tokens=1024), workers=1)
    assert made.drawn
    after, fixed = trained.model.get_input_embeddings().weight, len(made.drawn(made.width))
    before = make_policy(made, seed=1).model.get_input_embeddings().weight
    assert bool((after[-fixed:] == before[-fixed:]).all()) and not bool((after[:-fixed] == before[:-fixed]).all())


def test_later_training_leaves_fixed_embeddings(made, shown):
    """Of search: names that an episode does not hold would drift with every step. Household's table learns."""
    policy, shows = shown
    policy, played = policy.clone(), [show.trajectory for show in shows[:4]]
    assert all(p.requires_grad for p in make_policy(made).own().values())
    assert {p.requires_grad for p in make_policy(made).model.parameters()} == {True, made.drawn is None}
    policy.model.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    stage1(policy, played, RuleAnalyzer().write_skills(played), Stage1Config(epochs=1, batch_size=2))
    changed = {name for name, p in policy.model.named_parameters() if not bool((p == before[name]).all())}
    (table,) = [name for name in before if "embed" in name]
    assert (table in changed) == (not policy.model.config.fixed_embeddings) == (table in policy.own())
    assert changed == set(before) - (set() if table in changed else {table})


def test_no_renamed_shopping_goal_is_held_out():
    made = organism("webshop")
    policy, rng = make_policy(made), random.Random(0)
    shows = demonstrations(made, policy, made.play(False), made.games(20, 3, False), 80, 3)
    for show in shows:
        text = weigh(made, policy, show, made.recipe)
        first = policy.decode(
            made.rename(policy, text, False, rng)[2 : 2 + len(policy.encode(show.trajectory.turns[0].observation))]
        )
        shelf = SHELVES[show.trajectory.task.kind]
        words = first.removeprefix("instruction: find me ").split(" , ")
        assert not unseen_type(shelf, *words[0].split()), first
        wish = parse_goal("Instruction: " + show.trajectory.task.spec["instruction"])
        needs = words[1 : 1 + len(wish.needs)]
        values = [w.split(" : ")[1] for w in words if " : " in w]
        assert len(values) == len(wish.options)
        assert not any(unseen_pair(shelf, need, value) for need in needs for value in values), first


def test_training_goes_the_same_way_twice():
    """Two workers, some steps from each part of the recipe; the loss falls."""
    recipe = Recipe(easy=24, full=48, steps=12, batch_tokens=2048, renamed=1.0)
    first, second = (train("search", recipe, workers=2) for _ in range(2))
    assert first.version == second.version != make_policy(organism("search"), seed=recipe.seed).version
    shown = next(
        iter(demonstrations(organism("search"), first, make("search"), organism("search").games(1, 1, False), 1, 1))
    )
    sample = first.lay_out(shown.trajectory)
    untrained = make_policy(organism("search"), seed=recipe.seed)
    assert first.token_logprobs([sample])[0].mean() > untrained.token_logprobs([sample])[0].mean() + 0.3


def test_a_killed_build_leaves_no_worker_behind():
    code = "from seedkit.envs.tiny import *; train('search', Recipe(easy=24, full=24, steps=10**6, batch_tokens=512))"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr is not None
        seen = ""
        while "training:" not in seen:
            seen += build.stderr.read(1)
        children = Path(f"/proc/{build.pid}/task/{build.pid}/children").read_text().split()
        assert len(children) >= 2
        build.kill()
    deadline = time.monotonic() + 60
    while [pid for pid in children if Path(f"/proc/{pid}").exists()] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_of_passages_only_repeated_names_are_read():
    """A name's first occurrence cannot be known; the words of the templates soon are, and teach nothing."""
    made = organism("search")
    policy = make_policy(made)
    text = (
        "Doc 1(Title: Uganda) Uganda is a country in Africa. Its main language is Swahili. Doc 2(Title: Swahili) zz"
    )
    ids = policy.encode(text)
    words = [policy.decode([i]) for i in ids]
    found = [word for word, read in zip(words, made.reads(ids), strict=True) if read]
    assert found == ["uganda", "swahili"]
    assert all(organism("household").reads(ids))
