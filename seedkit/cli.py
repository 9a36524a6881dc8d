"""The `seedkit` command: thin calls of the package's own functions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from seedkit.envs import DEFAULT, NAMES

ENVIRONMENT = f"environment: {', '.join(NAMES)}, or module:Class of your own"
POLICY = "name or folder; default: the one that comes with the environment"
LONGEST = "longest answer in tokens; default: what an action takes. Reasoning needs more"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors the user can mend are one line on stderr and exit status 2."""
    options = _parser().parse_args(arguments)
    try:
        options.run_command(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"seedkit {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was written is complete", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seedkit", description="Agentic self-distillation, token by token.")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="Stage 1, GRPO and SEED from the same start, a table and a report")
    demo.add_argument("--env", default=DEFAULT, help=f"{ENVIRONMENT}; one that a policy comes with")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"))
    demo.add_argument("--updates", type=int, default=24)
    demo.add_argument("--panel", type=int, default=72, help="held-out tasks")
    demo.add_argument("--seed", type=int, default=0)
    demo.set_defaults(run_command=_demo)

    build = commands.add_parser("build-policy", help="train an environment's policy from scratch (up to 45 minutes)")
    build.add_argument("--env", default=DEFAULT, help=ENVIRONMENT)
    build.add_argument("--out", type=Path, help="default: runs/ENV-tiny")
    build.set_defaults(run_command=_build)

    train = commands.add_parser("train", help="Stage 2 with one method")
    train.add_argument("--env", default=DEFAULT, help=ENVIRONMENT)
    train.add_argument("--method", default="seed")
    train.add_argument("--policy", help=POLICY)
    train.add_argument("--run", type=Path, required=True, help="run directory")
    train.add_argument("--resume", action="store_true", help="go on with the run if it exists")
    train.add_argument("--updates", type=int, default=24)
    train.add_argument("--tasks", type=int, default=8, help="tasks an update")
    train.add_argument("--group", type=int, default=8, help="episodes a task")
    train.add_argument("--lr", type=float, default=None)
    train.add_argument("--coef", type=float, default=None, help="λ; default: the method's")
    train.add_argument("--beta", type=float, default=None, help="β; default: the method's")
    train.add_argument("--teacher", type=float, default=None, help="weights it keeps: 0 live, 1 frozen, between EMA")
    train.add_argument("--analyzer", default=None, help="self, frozen, rule, library; a placebo: irrelevant, ...")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--max-new-tokens", type=int, help=LONGEST)
    train.add_argument("--validation", type=int, default=48, help="tasks of valid_seen to validate on; 0: none")
    train.set_defaults(run_command=_train)

    versus = commands.add_parser("compare", help="several methods, several seeds, one start: a table with intervals")
    versus.add_argument("--env", default=DEFAULT, help=ENVIRONMENT)
    versus.add_argument(
        "--methods",
        nargs="+",
        default=["grpo", "seed", "seed:analyzer=irrelevant"],
        metavar="ARM",
        help="names in METHODS, or base; switches behind a colon: seed:coef=0.1,analyzer=irrelevant",
    )
    versus.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    versus.add_argument("--panel", default="valid_unseen", help="split of the test")
    versus.add_argument("--limit", type=int, default=216, help="tasks of it, all kinds in equal shares")
    versus.add_argument("--episodes", type=int, default=1, help="a task in the test")
    versus.add_argument("--train-tasks", type=int, default=384, help="training tasks, all kinds in equal shares")
    versus.add_argument("--start", help="policy all start from (name or folder); default: ENV-tiny-stage1")
    versus.add_argument("--updates", type=int, default=24)
    versus.add_argument("--tasks", type=int, default=4, help="tasks an update")
    versus.add_argument("--group", type=int, default=8, help="episodes a task")
    versus.add_argument("--lr", type=float, default=3e-4)
    versus.add_argument("--max-steps", type=int, default=20, help="turns an episode")
    versus.add_argument("--max-new-tokens", type=int, help=LONGEST)
    versus.add_argument("--validation", type=int, default=96, help="tasks of valid_seen for the curves; 0: none")
    versus.add_argument("--eval-every", type=int, default=5, help="updates between two validations")
    versus.add_argument("--baseline", default="grpo")
    versus.add_argument("--processes", type=int, help="jobs at a time; default: one a core")
    versus.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder; what is there is not redone")
    versus.add_argument("--known", type=Path, help="recorded results of the same plan: jobs not to run again")
    versus.add_argument("--results", type=Path, nargs="+", help="only tabulate recorded results, run nothing")
    versus.add_argument("--figures", type=Path, help="folder for curves, differences and kinds as SVG, PDF and CSV")
    versus.set_defaults(run_command=_compare)

    measure = commands.add_parser("evaluate", help="success on a panel, with its interval")
    measure.add_argument("--env", default=DEFAULT, help=ENVIRONMENT)
    measure.add_argument("--policy", help=POLICY)
    measure.add_argument("--split", default="valid_unseen")
    measure.add_argument("--tasks", type=int, default=108)
    measure.add_argument("--episodes", type=int, default=2)
    measure.add_argument("--temperature", type=float, default=0.4)
    measure.add_argument("--seed", type=int, default=0)
    measure.add_argument("--max-new-tokens", type=int, help=LONGEST)
    measure.add_argument("--prompted", action="store_true", help="put the library's skill into the prompt")
    measure.set_defaults(run_command=_evaluate)

    inspect = commands.add_parser(
        "inspect", help="a page that shows which tokens a skill moves, from recorded episodes"
    )
    inspect.add_argument(
        "source", type=Path, help="run directory, .parquet or .jsonl of trajectories, others' rollouts"
    )
    inspect.add_argument("-o", "--out", type=Path, required=True, help="the page to write (.html)")
    inspect.add_argument("--update", type=int, help="of a run: which update's trajectories; default: the last kept")
    inspect.add_argument("--trajectory", help="number (from 1) or id; default: all of them")
    inspect.add_argument("--skill", type=Path, help="a text file: score the episodes again under this skill")
    inspect.add_argument("--model", help="policy that scores (name or folder); default: the one that played")
    inspect.add_argument("--method", help="a name in METHODS; default: the run's, else seed")
    inspect.set_defaults(run_command=_inspect)

    serve = commands.add_parser(
        "serve-search", help="our passages behind the Search-R1 /retrieve protocol, loopback only"
    )
    serve.add_argument("--port", type=int, default=8000, help="0: any that is free")
    serve.add_argument("--corpus", type=Path, help="a FlashRAG corpus (.jsonl); default: the embedded one")
    serve.set_defaults(run_command=_serve_search)

    doctor = commands.add_parser("doctor", help="what is here, what is missing and how to get it")
    doctor.set_defaults(run_command=_doctor)
    return parser


def _demo(options: argparse.Namespace) -> None:
    from seedkit.demo import demo

    demo(options.out, environment=options.env, updates=options.updates, panel=options.panel, seed=options.seed)


def _build(options: argparse.Namespace) -> None:
    from seedkit.envs import build_policy

    build_policy(options.env, options.out or Path("runs") / f"{options.env}-tiny")


def _train(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from seedkit.analyzer import by_name
    from seedkit.envs import make, shipped_policy, spread
    from seedkit.methods import resolve
    from seedkit.policy import load_policy
    from seedkit.train import Stage2Config, stage2

    env = make(options.env)
    method, analyzer = resolve(options.method), None
    policy = load_policy(options.policy or shipped_policy(options.env))
    if options.teacher is not None:
        method = replace(method, teacher_decay=options.teacher)
    if options.analyzer is not None:
        own = "library" if method.skills == "library" else "self"
        analyzer = by_name(options.analyzer, policy, instead_of=own)
    names = ("method", "updates", "tasks", "group", "coef", "beta", "seed", "max_new_tokens")
    given = {name: getattr(options, name) for name in names}
    config = Stage2Config(**given | ({} if options.lr is None else {"lr": options.lr}))
    validation = spread(env.panel("valid_seen"), options.validation)
    rows = stage2(
        policy,
        env,
        env.panel("train"),
        config,
        method=method,
        analyzer=analyzer,
        run=options.run,
        resume=options.resume,
        validation=validation,
        progress=True,
    )
    print(f"{options.method}: {len(rows)} updates, last training success {rows[-1]['success']:.2f} → {options.run}")


def _compare(options: argparse.Namespace) -> None:
    from seedkit.experiment import read_results, summary, table

    if options.results:
        outcomes = [o for path in options.results for o in read_results(path)]
    else:
        outcomes = _run_comparison(options)
    rows = summary(outcomes, baseline=options.baseline)
    print(table(rows))
    if options.figures:
        from seedkit.plots import comparison_figures, save_figure

        for name, figure in comparison_figures(outcomes, rows).items():
            print(*save_figure(figure, options.figures / name))


def _run_comparison(options: argparse.Namespace) -> list:
    from seedkit.envs import make, shipped_policy, spread
    from seedkit.experiment import Arm, Plan, read_results, run
    from seedkit.train import Stage2Config

    env, arms = make(options.env), [Arm.parse(text) for text in options.methods]
    names = ("updates", "tasks", "group", "lr", "max_steps", "max_new_tokens")
    plan = Plan(
        options.start or f"{shipped_policy(options.env)}-stage1",
        spread(env.panel("train"), options.train_tasks),
        spread(env.panel(options.panel), options.limit),
        spread(env.panel("valid_seen"), options.validation),
        Stage2Config(**{name: getattr(options, name) for name in names}),
        episodes=options.episodes,
        eval_every=options.eval_every,
        environment=options.env,
    )
    known = read_results(options.known) if options.known else ()
    return run(arms, options.seeds, plan, options.out, known=known, processes=options.processes, progress=True)


def _evaluate(options: argparse.Namespace) -> None:
    from seedkit.analyzer import SkillLibrary
    from seedkit.envs import make, shipped_policy, spread
    from seedkit.evaluate import compare, evaluate, table
    from seedkit.policy import load_policy

    env = make(options.env)
    tasks = spread(env.panel(options.split), options.tasks)
    result = evaluate(
        load_policy(options.policy or shipped_policy(options.env)),
        env,
        tasks,
        episodes=options.episodes,
        temperature=options.temperature,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        skills=SkillLibrary().write_for(tasks) if options.prompted else None,
        progress=True,
    )
    print(table(compare([result], baseline=result.name)))
    print(json.dumps(result.protocol))


def _inspect(options: argparse.Namespace) -> None:
    try:
        from seedkit.widgets.page import inspect  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError(f"the inspector needs {error.name}: pip install 'seedkit[notebook]'") from error

    names = ("update", "trajectory", "skill", "model", "method")
    print(inspect(options.source, options.out, **{name: getattr(options, name) for name in names}))


def _serve_search(options: argparse.Namespace) -> None:
    from seedkit.envs.search_server import serve

    serve(options.port, options.corpus)


def _doctor(options: argparse.Namespace) -> None:
    from seedkit.doctor import report

    print(report())


if __name__ == "__main__":
    raise SystemExit(main())
