"""How the embedded policies (`household-tiny`, `search-tiny`, …) are made, examined and described.

A *model organism* of the situation SEED starts from: it can use a skill it is given, is mediocre without one, ignores
advice about something else, follows wrong advice, and writes vague hindsight until Stage 1 teaches it better. All of
that is put there by demonstrations of a scripted player under four conditions (no skill, right, wrong, irrelevant);
nothing here stands in for a language model. What an environment adds is its `Organism`.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from seedkit.analyzer import PolicyAnalyzer, RuleAnalyzer
from seedkit.envs import make, spread
from seedkit.envs.base import TextEnv
from seedkit.evaluate import Result, evaluate
from seedkit.io import atomic_write
from seedkit.policy import Layout, Policy, load_policy
from seedkit.rollout import collect
from seedkit.train import Stage1Config, stage1
from seedkit.types import Skill, Task, Trajectory, Turn

SPECIAL = ["<pad>", "<unk>", "<bos>", "<user>", "<assistant>", "<end>", "<skill>", "<analyze>"]
LAYOUT = Layout("<bos><user>", "<user>", "<assistant>", "<end>", "<skill>", "<analyze>")
HEAD = 32
"""Width of an attention head."""
CONDITIONS = ("none", "right", "wrong", "irrelevant")


@dataclass(frozen=True)
class Recipe:
    """What decides the weights of a policy."""

    easy: int = 6000
    """Demonstrations of the easy sort (`Organism.games`, `play`), which teach copying early."""
    drills: int = 0
    """Texts that ask many times for what a demonstration asks for once (`Organism.drill`)."""
    full: int = 12000
    """Demonstrations of the sort that the panels have."""
    renamed: float = 0.8
    """Chance that objects trade names in a text, anew at each use: a name must be read, it cannot be remembered."""
    first_names: int = 16
    """How many are few: telling those apart is learnt sooner, then extends to all."""
    steps: int = 1700
    """Gradient steps."""
    easy_share: float = 0.15
    """Share of the steps that are spent on the easy sort, at the start."""
    drill_share: float = 0.0
    """Share of the steps that are spent on drills alone, after the easy sort: who cannot copy learns nothing there.
    Among the full sort they stay, lest they be forgotten.
    """
    reading_share: float = 0.3
    """Share of the steps, at the start, in which what the game says is learnt too. Left out after that on the
    suspicion that its surprises drown the commands; not tested by itself (LOG.md)."""
    few_share: float = 0.3
    """Share of the steps, at the start, in which few names are drawn."""
    batch_tokens: int = 8192
    """Padded tokens a step, over all workers."""
    matrix_lr: float = 0.02
    """Muon's step size, for the weight matrices."""
    lr: float = 3e-3
    """AdamW's, for embeddings and norms."""
    reading_weight: float = 0.2
    """Weight of the game's words in the reading steps (a command's words: 1)."""
    verb_weight: float = 3.0
    """Weight of a command's first tokens, where the decision lies."""
    wander_weight: float = 0.3
    """Factor for commands without a purpose; random moves and slips count 0."""
    right_analyses: float = 0.3
    """Share of analysis examples that name the episode's own workflow; the rest what `Organism.vague` needs."""
    seed: int = 1


@dataclass(frozen=True)
class Organism:
    """What an environment knows of its policy; `ORGANISM` of the module `seedkit.envs.NAME_policy`."""

    env: str
    kinds: Sequence[str]
    vague: str
    """The kind whose workflow most analyses name before Stage 1, whatever was played."""
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    habit: Callable[[str, random.Random], str]
    """The plan of an unadvised player for a kind."""
    expert: Callable[..., Any]
    skills: ModuleType
    """WORKFLOWS, AVOID, PLACEBOS, WRONG_PLANS, skill_text, diagnose."""
    games: Callable[[int, int, bool], Iterable[Task]]
    """(count, seed, easy) -> training tasks, none of a committed panel's."""
    play: Callable[[bool], TextEnv]
    """(easy) -> the environment that they are played in."""
    rename: Callable[[Policy, Text, bool, random.Random], list[int]]
    """(policy, text, few names, chance) -> its tokens, with names that are drawn anew."""
    max_steps: int
    """Most commands of a demonstration."""
    told: str
    """What the card says of the data and the licence."""
    recipe: Recipe = Recipe()
    stage1: Stage1Config = Stage1Config()
    """How the policy is taught to write skills, for the one that ships after Stage 1."""
    drill: Callable[[Policy, Recipe, random.Random], Text] | None = None
    """A text that asks for facts, without an episode around it."""
    reads: Callable[[Sequence[int]], Sequence[bool]] = lambda ids: [True] * len(ids)
    """Which tokens of a text are learnt where they are the game's words, in the reading steps."""
    drawn: Callable[[int], torch.Tensor] | None = None
    """width -> embeddings, which stay, of the tokens at the end of the vocabulary that are too many to learn."""
    width: int = 160
    """Of the hidden layers."""
    decided: int = 1
    """Tokens at the start of a command in which the decision lies."""


def organism(env: str) -> Organism:
    """The organism of an environment."""
    return import_module(f"seedkit.envs.{env}_policy").ORGANISM


def special_tokens(tokenizer: Any) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary begins with `SPECIAL`, in transformers' form."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
    )


def make_policy(
    made: Organism, *, width: int | None = None, layers: int = 4, heads: int | None = None, seed: int = 0
) -> Policy:
    """An untrained policy of the organism's words; width and heads are the organism's where None."""
    torch.manual_seed(seed)
    tokenizer = made.tokenizer()
    width = width or made.width
    heads = heads or width // HEAD
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=int(width * 8 / 3 // 16 * 16),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=5,
        pad_token_id=0,
        initializer_range=0.02,
    )
    config.fixed_embeddings = made.drawn is not None
    policy = Policy(LlamaForCausalLM(config), tokenizer, LAYOUT, f"{made.env}-tiny")
    if made.drawn:
        fixed = made.drawn(width)
        policy.model.get_input_embeddings().weight.data[-len(fixed) :] = fixed
    return policy


def name_embeddings(count: int, width: int) -> torch.Tensor:
    """For `Organism.drawn`: [count, width], of length 2, in the entries that one head can carry, and copy."""
    drawn = torch.zeros(count, width)
    drawn[:, :HEAD] = 2 * torch.nn.functional.normalize(torch.randn(count, HEAD), dim=-1)
    return drawn


def repeated(ids: Sequence[int], first: int) -> list[bool]:
    """For `Organism.reads`: which tokens from number `first` on a text has had before; the others cannot be known."""
    known: set[int] = set()
    found = []
    for i in ids:
        found.append(i in known)
        if i >= first:
            known.add(i)
    return found


# --- demonstrations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demonstration:
    """An episode of the scripted player, and what each of its commands was for."""

    trajectory: Trajectory
    stages: tuple[str, ...]


def advice(made: Organism, condition: str, kind: str, rng: random.Random) -> tuple[str, Skill | None]:
    """(plan that the player will follow, skill that stands in its prompt) for one of the four conditions."""
    s = made.skills
    avoid = rng.choice([None, None, *s.AVOID])
    if condition == "none":
        return made.habit(kind, rng), None
    if condition == "right":
        return kind, Skill(s.skill_text(kind, kind, avoid))
    if condition == "wrong":
        plan = rng.choice(s.WRONG_PLANS[kind])
        return plan, Skill(s.skill_text(kind, plan, avoid))
    if rng.random() < 0.4:
        return made.habit(kind, rng), Skill(" ".join(rng.sample(s.PLACEBOS, rng.choice((1, 2)))))
    other = rng.choice([k for k in made.kinds if k != kind])
    workflow = rng.choice([other, other, *s.WORKFLOWS])
    return made.habit(kind, rng), Skill(s.skill_text(other, workflow, avoid))


def demonstrate(
    made: Organism, policy: Policy, env: TextEnv, task: Task, condition: str, rng: random.Random, wander: int = 3
) -> Demonstration:
    """Play one task with the scripted player and write it down in the policy's tokens."""
    plan, skill = advice(made, condition, task.kind, rng)
    advised = condition in ("right", "wrong")
    now = env.reset(task)
    player = made.expert(now, plan, rng, noise=0.02 if advised else 0.04, slip=0.03, forget=0.02 if advised else 0.12)
    context, turns, stages = policy.prompt_ids([], now.text, now.admissible, skill), [], []
    while len(turns) < made.max_steps and stages.count("wander") < wander and not now.done:
        command = player.act(now)
        response = [*policy.encode(command), policy.end_id]
        after = env.step(command)
        valid = after.reason is None if now.admissible is None else command in now.admissible
        turns.append(
            Turn(now.text, now.admissible, tuple(context), tuple(response), (0.0,) * len(response), command, valid)
        )
        stages.append(player.stage)
        now = after
        context = policy.prompt_ids(turns, now.text, now.admissible, skill)
    trajectory = Trajectory(
        id=f"{task.id}/demo",
        task=task,
        turns=tuple(turns),
        success=now.success,
        reward=float(now.success),
        policy_version="expert",
        seed=0,
        final_observation=now.text,
        truncated=not now.done,
        skill=skill,
    )
    return Demonstration(trajectory, tuple(stages))


def demonstrations(
    made: Organism, policy: Policy, env: TextEnv, tasks: Iterable[Task], count: int, seed: int
) -> Iterator[Demonstration]:
    """`count` episodes, one under each of the four conditions in every task."""
    rng = random.Random(seed)
    for task in tasks:
        for condition in CONDITIONS[:count]:
            yield demonstrate(made, policy, env, task, condition, rng)
        count -= len(CONDITIONS)


# --- training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A training text: tokens, the weight of each one's loss (None: the game's words), and its task."""

    ids: list[int]
    weights: Sequence[float | None]
    task: Task


def weigh(made: Organism, policy: Policy, demo: Demonstration, recipe: Recipe) -> Text:
    """An episode as training text."""
    ids = list(policy.lay_out(demo.trajectory).ids)
    reading, weights = made.reads(ids), list[float | None]()
    for turn, stage in zip(demo.trajectory.turns, demo.stages, strict=True):
        factor = {"noise": 0.0, "slip": 0.0, "wander": recipe.wander_weight}.get(stage, 1.0)
        weights += [None if reads else 0.0 for reads in reading[len(weights) : len(weights) + len(turn.context_ids)]]
        decided = min(made.decided, len(turn.response_ids))
        weights += [factor * recipe.verb_weight] * decided + [factor] * (len(turn.response_ids) - decided)
    return Text(ids, weights, demo.trajectory.task)


def weigh_drill(
    made: Organism,
    policy: Policy,
    said: Iterable[tuple[str, str]],
    task: Task,
    recipe: Recipe,
    skill: Skill | None = None,
) -> Text:
    """What is said and what answers it, turn by turn, as training text."""
    ids, weights = list[int](), list[float | None]()
    for n, (text, answer) in enumerate(said):
        context = policy.turn_ids(text, n) if n else policy.open_ids(text, skill)
        response = [*policy.encode(answer), policy.end_id]
        weights += [None if reads else 0.0 for reads in made.reads([*ids, *context])[len(ids) :]]
        weights += [recipe.verb_weight] * made.decided + [1.0] * (len(response) - made.decided)
        ids = [*ids, *context, *response]
    return Text(ids, weights, task)


def weigh_analysis(made: Organism, policy: Policy, demo: Demonstration, recipe: Recipe, rng: random.Random) -> Text:
    """A finished episode and a hindsight skill: mostly the vague one, so that Stage 1 has something to teach."""
    kind = demo.trajectory.task.kind if rng.random() < recipe.right_analyses else made.vague
    prompt = policy.analysis_ids(demo.trajectory)
    text = json.dumps({"episode_skill": made.skills.skill_text(kind, kind, made.skills.diagnose(demo.trajectory))})
    answer = [*policy.encode(text), policy.end_id]
    return Text(prompt + answer, [0.0] * len(prompt) + [1.0] * len(answer), demo.trajectory.task)


def training_texts(made: Organism, recipe: Recipe, part: int, parts: int) -> list[list[Text]]:
    """One worker's share of easy texts, drills and full texts."""
    policy, out = make_policy(made), []
    for count, easy, seed in ((recipe.easy, True, 50), (recipe.full, False, 0)):
        count, own = count // parts, recipe.seed + seed + part
        rng = random.Random(f"{recipe.seed}-{part}-{seed}")
        texts: list[Text] = []
        tasks = made.games(-(-count // len(CONDITIONS)), 1000 + own, easy)
        shows = demonstrations(made, policy, made.play(easy), tasks, count, own)
        for n, demo in enumerate(tqdm(shows, total=count, desc="demonstrations", disable=part > 0)):
            texts.append(weigh(made, policy, demo, recipe))
            if n % 3 == 0:
                texts.append(weigh_analysis(made, policy, demo, recipe, rng))
        out.append(texts)
    rng = random.Random(f"{recipe.seed}-{part}-drills")
    drills = [made.drill(policy, recipe, rng) for _ in range(recipe.drills // parts)] if made.drill else []
    return [out[0], drills, out[1] + drills]


def pack(texts: Sequence[Text], budget: int, rng: random.Random) -> list[list[Text]]:
    """Batches of texts of similar length under a token budget, in random order."""
    order = list(texts)
    rng.shuffle(order)
    packs: list[list[Text]] = []
    for start in range(0, len(order), 1024):
        packs.append([])
        for text in sorted(order[start : start + 1024], key=lambda t: len(t.ids)):
            if packs[-1] and (len(packs[-1]) + 1) * len(text.ids) > budget:
                packs.append([])
            packs[-1].append(text)
    rng.shuffle(packs)
    return packs


def _worker(rank: int, workers: int, folder: str, env: str, recipe: Recipe) -> None:
    """Demonstrate, then train in step with the other workers; gradients are averaged."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # the workers wait for each other: a core for each
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=workers)
    made = organism(env)
    policy = make_policy(made, seed=recipe.seed)
    parts = training_texts(made, recipe, rank, workers)
    model, rng = policy.model.train().requires_grad_(True), random.Random(f"{recipe.seed}-{rank}-order")
    parameters = list(model.parameters())
    fixed = len(made.drawn(made.width)) if made.drawn else 0
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for p in parameters if all(p is not m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = (recipe.matrix_lr, recipe.lr)
    packs: list[list[Text]] = []
    turns = [int(recipe.steps * share) for share in (recipe.easy_share, recipe.easy_share + recipe.drill_share)]
    reading, telling = (int(recipe.steps * share) for share in (recipe.reading_share, recipe.few_share))
    bar, parent = tqdm(range(recipe.steps), desc="training", disable=rank > 0), os.getppid()
    for step in bar:
        if os.getppid() != parent:  # killed: nobody waits for this
            return
        if not packs or step in turns:
            packs = pack(parts[sum(step >= turn for turn in turns)], recipe.batch_tokens // workers, rng)
        factor = min(1.0, (step + 1) / 60, (recipe.steps - step) / (0.4 * recipe.steps))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        batch = packs.pop()
        few = step < telling
        ids = [made.rename(policy, t, few, rng) if rng.random() < recipe.renamed else t.ids for t in batch]
        loss = _loss(policy, ids, [t.weights for t in batch], recipe.reading_weight if step < reading else 0.0)
        loss.backward()
        if fixed:
            model.get_input_embeddings().weight.grad[-fixed:] = 0  # type: ignore[index]
        gradient = torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]
        distributed.all_reduce(gradient)
        gradient *= min(1.0, 1.0 / float(gradient.norm() / workers)) / workers
        for p, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{float(loss.detach()):.3f}", refresh=False)
        if rank == 0 and (step + 1 == recipe.steps or step % 250 == 249):
            policy.save(Path(folder) / "policy")
    distributed.destroy_process_group()


def _loss(
    policy: Policy, texts: list[list[int]], weights: list[Sequence[float | None]], reading: float
) -> torch.Tensor:
    """Weighted cross-entropy of a batch, nats a token; `reading` is the weight of the game's words."""
    width = max(map(len, texts))
    ids = torch.tensor([t + [policy.pad_id] * (width - len(t)) for t in texts])
    given = [[reading if x is None else x for x in w] + [0.0] * (width - len(w)) for w in weights]
    weight = torch.tensor(given)[:, 1:]
    hidden = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    counted = weight > 0
    logits = policy.model.get_output_embeddings()(hidden[counted])
    loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
    return (loss * weight[counted]).sum() / weight[counted].sum()


def train(env: str, recipe: Recipe, *, workers: int = 2) -> Policy:
    """An environment's policy, trained from scratch by processes that work in step."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_worker, args=(workers, folder, env, recipe), nprocs=workers)
        policy = load_policy(Path(folder) / "policy")
    policy.name = f"{env}-tiny"
    return policy


def build_policy(env: str, out: Path, *, workers: int = 2) -> None:
    """Train and examine an environment's policy; write it with its card to `out`, after Stage 1 to `out`-stage1."""
    begin, made = time.perf_counter(), organism(env)
    policy = train(env, made.recipe, workers=workers)
    policy.save(out)
    minutes = (time.perf_counter() - begin) / 60
    taught = teach_repeatedly(made, policy, 2)
    found = examine(made, policy, taught)
    write_card(made, out, policy, found, minutes)
    write_successes(out / "measured.jsonl", [*found["arms"].values(), *found["after stage 1"]])
    write_taught(made, out, policy, taught[0])


def write_taught(made: Organism, out: Path, policy: Policy, taught: Policy) -> None:
    """The policy after Stage 1, with its card, to `out`-stage1."""
    folder = out.with_name(f"{out.name}-stage1")
    taught.save(folder)
    count = len(make(made.env).panel("train"))
    atomic_write(
        folder / "README.md",
        f"""# {policy.name}-stage1

[{policy.name}](../{out.name}/README.md) (weights `{policy.version}`) after Stage 1: what Stage 2 starts from in every
recorded comparison. It is a file because one recipe gives other weights on another CPU or with another number of
threads, and arms must begin alike.

**Recipe.** One episode of each of the {count} training tasks (T = 1, seed 0), annotated by `RuleAnalyzer`, then
`stage1` with `{made.stage1}`.
`seedkit build-policy --env {made.env}` makes it beside the policy itself.

**Weights** `{taught.version}`. **Measured:** its play and its analyses are the first run's after Stage 1 in the other
card; success without and with the library's skill in the prompt stands in the recorded results (`base`,
`base:prompted=true`).

**Licence.** Apache-2.0, as the repository.
""",
    )


# --- what it can do -----------------------------------------------------------------------------------------------


def arms(made: Organism, tasks: Sequence[Task], seed: int = 0) -> dict[str, list[Skill | None]]:
    """Prompts that the policy is examined under: nothing, right, wrong, another kind's right skill, idle talk."""
    rng, s = random.Random(seed), made.skills
    others = [rng.choice([k for k in made.kinds if k != t.kind]) for t in tasks]
    return {
        "unprompted": [None] * len(tasks),
        "right skill": [Skill(s.skill_text(t.kind, t.kind)) for t in tasks],
        "another kind's skill": [Skill(s.skill_text(k, k)) for k in others],
        "text without advice": [Skill(rng.choice(s.PLACEBOS)) for _ in tasks],
        "wrong skill": [Skill(s.skill_text(t.kind, rng.choice(s.WRONG_PLANS[t.kind]))) for t in tasks],
    }


def teach_repeatedly(made: Organism, policy: Policy, repeats: int, *, seed: int = 0) -> list[Policy]:
    """Copies of the policy after Stage 1, on the same training episodes in another order each time."""
    env = make(made.env)
    played = collect(policy, env, env.panel("train"), seed=seed)
    skills, taught = RuleAnalyzer().write_skills(played), [policy.clone() for _ in range(repeats)]
    for n, pupil in enumerate(taught, seed):
        for parameter in pupil.own().values():
            parameter.requires_grad_(True)
        stage1(pupil, played, skills, replace(made.stage1, seed=n))
    return taught


def examine(
    made: Organism, policy: Policy, taught: Sequence[Policy], *, count: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """On `valid_unseen`, T = 0.4: success in each arm; analyzer and unprompted success before and after Stage 1.

    Args:
        count: games of the panel, all kinds in equal shares, as they go when the whole panel is played; None: all.
    """
    env = make(made.env)
    unseen = env.panel("valid_unseen")
    places = sorted(unseen.index(task) for task in spread(unseen, count or len(unseen)))
    tasks = [unseen[n] for n in places]
    results = {
        name: evaluate(policy, env, tasks, name=name, skills=[skills[n] for n in places], seed=seed, progress=True)
        for name, skills in arms(made, unseen).items()
    }
    probe = collect(policy, env, tasks, seed=seed + 1)
    accuracy = {
        "before": analyzer_accuracy(env, policy, probe),
        "after": [analyzer_accuracy(env, p, probe) for p in taught],
    }
    play = [
        evaluate(p, env, tasks, name=f"unprompted, after Stage 1, run {n}", seed=seed)
        for n, p in enumerate(taught, 1)
    ]
    return {"arms": results, "analyzer": accuracy, "after stage 1": play}


def write_successes(path: Path, results: Sequence[Result]) -> None:
    """Who succeeded, game by game in the panel's order: a line an arm, a text of 0 and 1."""
    rows = [{"name": r.name, "successes": "".join(str(int(s)) for s in r.successes[0])} for r in results]
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))


def analyzer_accuracy(env: TextEnv, policy: Policy, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Share of a kind's trajectories whose analysis names the workflow that the kind needs."""
    skills = PolicyAnalyzer(policy).write_skills(trajectories)
    right = defaultdict(list)
    for trajectory, skill in zip(trajectories, skills, strict=True):
        right[trajectory.task.kind].append(env.names_workflow(trajectory.task, skill))
    return {kind: sum(hits) / len(hits) for kind, hits in sorted(right.items())}


def write_card(made: Organism, out: Path, policy: Policy, found: dict[str, Any], minutes: float) -> None:
    """The policy's card: what it is, how it was made, what it was measured to do."""
    lines = []
    for result in [*found["arms"].values(), *found["after stage 1"]]:
        mean, low, high = (100 * x for x in result.interval)
        kinds = " | ".join(f"{100 * v:.0f}" for v in result.by_kind.values())
        lines.append(f"| {result.name} | {mean:.1f} [{low:.1f}, {high:.1f}] | {kinds} |")
    rows = {"before Stage 1": found["analyzer"]["before"]}
    rows |= {f"after Stage 1, run {n}": row for n, row in enumerate(found["analyzer"]["after"], 1)}
    shares = {name: " | ".join(f"{100 * v:.0f}" for v in row.values()) for name, row in rows.items()}
    analyses = [f"| {name} | {share} |" for name, share in shares.items()]
    kinds = sorted(made.kinds)
    protocol = found["arms"]["unprompted"].protocol
    settings = ", ".join(f"{k} {v}" for k, v in asdict(made.recipe).items())
    size = sum(p.numel() for p in policy.model.parameters())
    atomic_write(
        out / "README.md",
        f"""# {policy.name}

A *model organism*, not a language model: {size:,} parameters and {len(policy.tokenizer)} tokens, trained from
scratch on a scripted player. It is built to stand where SEED starts from: mediocre without a skill, good with the
right one, not helped by an irrelevant one, misled by a wrong one, and writing vague hindsight until Stage 1. Do not
conclude from it what a pre-trained model would do.

{made.told}

**Recipe.** `seedkit build-policy --env {made.env}`, {minutes:.0f} minutes on two cores: {settings}.

**Measured** on `valid_unseen` ({protocol["tasks"]} tasks, panel {protocol["panel"]}), T = {protocol["temperature"]},
at most {protocol["max_steps"]} turns; success in % with 95 % bootstrap intervals over tasks. Weights:
`{policy.version}`.

| prompt | success | {" | ".join(kinds)} |
|---|---|{"---|" * len(kinds)}
{chr(10).join(lines)}

Analyses that name the right workflow, in % of finished `valid_unseen` episodes (greedy), before Stage 1 and after it:
two runs on the same 384 episodes (one a training task), each in its own order:

| | {" | ".join(kinds)} |
|---|{"---|" * len(kinds)}
{chr(10).join(analyses)}
""",
    )
