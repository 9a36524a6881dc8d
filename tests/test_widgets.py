"""Views without a browser: signals, token classes, vocabularies, exports, `seedkit inspect`."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seedkit.cli import main
from seedkit.io import Ledger, read_records, write_ledger, write_trajectories
from seedkit.methods import METHODS, Method, token_weights
from seedkit.policy import load_policy
from seedkit.rescoring import contrast, rescore
from seedkit.types import Skill
from seedkit.widgets import SkillEditor, SkillInspector, ViewError, token_classes  # pyright: ignore[reportMissingImports]
from seedkit.widgets.export import visible  # pyright: ignore[reportMissingImports]
from seedkit.widgets.inspector import SHOWN  # pyright: ignore[reportMissingImports]
from seedkit.widgets.signals import Vocabulary, advantages_of  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parent / "browser"))
from signals import HOSTILE, SKILL, hostile, shifts, trajectory

ROOT = Path(__file__).resolve().parents[1]
RIGHT = ROOT / "data" / "trajectories" / "household-right.jsonl"
WORDS = {n: f" w{n}".encode() for n in range(9)}


def small(**changes):
    t = trajectory([((0, 1), (2, 3)), ((4,), (5, 6))])
    return SkillInspector([t], [shifts(t)], skills=[SKILL], policy=WORDS, **changes)


# --- token classes


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        ("take apple 1 from countertop 2", "verb object number other receptacle number"),
        ("go to cabinet 10", "verb other receptacle number"),
        ("open fridge 1", "verb receptacle number"),
        ("heat egg 1 with microwave 1", "verb object number other receptacle number"),
        ("use desklamp 1 <end>", "verb object number tag"),
        ("<think> look </think>", "tag verb tag"),
        ("look .", "verb other"),
    ],
)
def test_classes_of_commands(words, classes):
    pieces = [(" " if n else "") + word for n, word in enumerate(words.split())]
    assert token_classes(pieces) == classes.split()


def test_places_are_those_of_the_environment():
    pieces = ["click", "[", "shelf", "]"]
    assert token_classes(pieces) == ["verb", "other", "receptacle", "other"]
    assert token_classes(pieces, "webshop") == ["verb", "other", "object", "other"]
    shown = trajectory([((0, 1), (2, 3))])
    words = {**dict.fromkeys(range(10), b" apple"), 2: b"look", 3: b" shelf"}
    for env, kind in (("household", "receptacle"), ("webshop", "object")):
        played = replace(shown, task=replace(shown.task, env=env))
        view = SkillInspector([played], [shifts(played)], skills=[SKILL], policy=words)
        assert list(view.frame()["class"]) == ["verb", kind]


def test_words_of_a_wordpiece_tokenizer_stand_apart():
    """But for pieces that go on a word; special tokens have no space before them."""
    policy = load_policy("search-tiny-stage1")
    ids = [*policy.encode("<search>East Caribbean Dollar zqx</search>"), policy.end_id]
    assert Vocabulary(policy).text(ids) == " <search> east caribbean dollar zqx </search><end>"


def test_in_search_the_tags_are_the_verbs():
    pieces = ["<search>", "isle", " of", " man", "</search>", "<end>"]
    assert token_classes(pieces, "search") == ["tag", "object", "other", "object", "tag", "tag"]
    assert token_classes(pieces)[1:4] == ["verb", "other", "receptacle"]


def test_classes_of_pieces_of_words():
    assert token_classes(["take", " count", "ert", "op", " ", "1", "2", ""]) == [
        *("verb", "receptacle", "receptacle", "receptacle", "other", "number", "number", "other")
    ]


def test_own_classes_and_wrong_ones():
    mine = small(classes=lambda pieces: ["tag"] * len(pieces))
    assert list(mine.frame()["class"]) == ["tag"] * 4
    for wrong in (lambda p: ["noun"] * len(p), lambda p: ["verb"]):
        with pytest.raises(ViewError, match="classes: one of verb, object"):
            small(classes=wrong)


# --- vocabularies


def test_vocabulary_of_whole_words_joins_with_spaces_as_the_tokenizer_does():
    policy = load_policy("household-tiny")
    vocabulary = Vocabulary(policy)
    ids = policy.encode("go to cabinet 1 and open it")
    assert vocabulary.joiner == " " and vocabulary.text(ids) == policy.tokenizer.decode(ids)
    assert vocabulary[policy.end_id] == b"<end>"


def test_vocabulary_of_byte_level_bpe_keeps_every_byte():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=inner))
    text = "안녕 🙂\n\tx\x00é"
    ids = inner.encode(text).ids
    assert len(ids) == len(text.encode())
    assert b"".join(vocabulary[i] for i in ids) == text.encode() and vocabulary.text(ids) == text
    assert len({vocabulary[i] for i in range(256)}) == 256


def test_vocabulary_of_sentencepiece_bytes():
    inner = Tokenizer(
        models.BPE({"<unk>": 0, "▁a": 1, "<0xE2>": 2, "b": 3}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert [vocabulary[i] for i in (1, 2, 3)] == [b" a", b"\xe2", b"b"] and vocabulary.joiner == ""
    assert vocabulary[99] == b"<99?>"


# --- numbers


@pytest.mark.parametrize("name", SHOWN)
def test_the_frame_holds_what_the_methods_say(name):
    view = SkillInspector.read(RIGHT, method=name, beta=None, coef=None)
    view.trajectory = 2
    frame = view.frame()
    s, k = torch.tensor(frame["student_logp"]), torch.tensor(frame["teacher_logp"])
    given: dict[str, Any] = {
        "student_logp": s[None],
        "teacher_logp": k[None],
        "response_mask": torch.ones(1, len(s)).bool(),
    }
    advantage = torch.tensor(advantages_of(view.signals.trajectories)[2]).float().double()[None]
    behaviour = torch.tensor(frame["behaviour_logp"])[None]
    weights = token_weights(name, advantage=advantage, behaviour_logp=behaviour, **given)[0]
    assert torch.allclose(torch.tensor(frame["weight"]), weights, atol=1e-9)
    assert np.allclose(frame["delta"], frame["teacher_logp"] - frame["student_logp"])
    assert len(frame) == len(view.signals.trajectories[2].response_ids)


def test_a_method_of_ones_own_is_computed_in_python():
    mine = Method(
        "mine", "A + λ·[Δ > 0]", "t", term=lambda s, k, m, *, beta, behaviour_logp: (k - s).clamp(min=0), coef=0.5
    )
    view = small(method=mine, coef=None, beta=None)
    view.beta = 4.0  # anything that asks for new numbers
    frame = view.frame()
    assert np.allclose(frame["pull"], 0.5 * (frame["delta"] > 0))
    sent = np.frombuffer(view.custom, "<f8").reshape(3, -1)
    assert np.allclose(sent[0], frame["weight"]) and np.allclose(sent[2], frame["pull"])
    assert [m["closed_form"] for m in view.meta["methods"] if m["name"] == "mine"] == [False]


def test_a_method_of_ones_own_has_its_numbers_from_the_start():
    mine = Method("mine", "A", "t", term=lambda s, k, m, *, beta, behaviour_logp: 0 * s, coef=0.5)
    assert np.frombuffer(small(method=mine, coef=None, beta=None).custom, "<f8").size == 12


def test_advantages_are_the_ledgers_or_relative_to_the_task():
    view = SkillInspector.read(RIGHT)
    wanted = advantages_of(view.signals.trajectories)
    assert max(wanted) > 0.4 and view.frame(1)["advantage"].tolist() == pytest.approx(
        [wanted[1]] * len(view.frame(1))
    )
    ledger = Ledger("seed", 5.0, 0.01, 10, (0.25,), (0.0,))
    assert set(small(ledger=ledger).frame()["advantage"]) == {0.25}
    assert set(small(ledger=ledger, advantages=[0.75]).frame()["advantage"]) == {0.75}
    assert set(small().frame()["advantage"]) == {0.0}  # alone in its group


def test_a_nan_teacher_and_no_skill_leave_the_policy_gradient():
    t = trajectory([((0,), (2, 3))])
    one = shifts(t)
    view = SkillInspector([t], [replace(one, teacher_logp=(math.nan, -1.0))], policy=WORDS, advantages=[1.0])
    frame = view.frame()
    assert np.isnan(frame["delta"][0]) and frame["weight"][0] == 1.0 and frame["pull"][0] == 0.0
    assert frame["weight"][1] == pytest.approx(1 + 0.01 / (1 + math.exp(-5 * frame["delta"][1])))
    alone = SkillInspector([t], None, policy=WORDS, advantages=[1.0]).frame()
    assert alone["delta"].isna().all() and (alone["weight"] == 1.0).all()


# --- what cannot be shown


def test_methods_on_the_whole_vocabulary_are_left_out_with_the_reason():
    assert {"reverse_kl_full", "js_full"} <= METHODS.keys() - SHOWN.keys()
    with pytest.raises(ViewError, match="reverse_kl_full has no weight a sampled token to show: its gradient"):
        small(method="reverse_kl_full", beta=None, coef=None)
    with pytest.raises(ViewError, match="step_scale 2; steps cannot"):
        small(method=replace(METHODS["opid"], step_scale=2.0), beta=None, coef=None)


def test_lists_that_do_not_fit_are_named():
    t = trajectory([((0,), (2, 3))])
    one = shifts(t)
    for arguments, words in (
        (([t], [one, one]), "shifts 'skill': 2 for 1 trajectories"),
        (([t], {"a": [one], "b": []}), "shifts 'b': 0 for 1"),
    ):
        with pytest.raises(ViewError, match=re.escape(words)):
            SkillInspector(*arguments, policy=WORDS)
    for options, words in (
        (
            {"skills": {"other": [SKILL]}},
            "skills and shifts should have the same names; only one of them has other, skill",
        ),
        ({"checkpoints": {"c": [[-1.0]]}}, "checkpoint 'c': one log-probability for every sampled token"),
        ({"advantages": [1.0, 2.0]}, "advantages: 2 for 1"),
    ):
        with pytest.raises(ViewError, match=re.escape(words)):
            SkillInspector([t], [one], policy=WORDS, **options)
    with pytest.raises(ValueError, match="unknown method 'sead'"):
        SkillInspector([t], [one], policy=WORDS, method="sead")
    with pytest.raises(ValueError, match="no policy 'made'"):
        SkillInspector([t], [one])  # the trajectories name a policy that is not here
    with pytest.raises(ViewError, match="give the policy"):
        SkillInspector([], [])


def test_contrasts_must_be_of_these_tokens():
    policy = load_policy("household-tiny")
    records = read_records(RIGHT)[:2]
    some, skills = [r.trajectory for r in records], [r.skill for r in records]
    found = contrast(policy, some, skills, top=3)
    view = SkillInspector(some, rescore(policy, some, skills), skills=skills, contrasts=found, policy=policy)
    assert found[0] is not None and view.signals.top == 3
    assert view.frame(0)["kl"].tolist() == pytest.approx(found[0].kl.tolist())
    with pytest.raises(ViewError, match="contrasts: "):
        SkillInspector(some, [r.shifts for r in records], contrasts=found[::-1], policy=policy)


# --- skill editor


def test_cancelling_a_rescore_that_runs_stops_it_and_changes_nothing(monkeypatch):
    policy = load_policy("household-tiny")
    some = [r.trajectory for r in read_records(RIGHT)[:4]]
    editor = SkillEditor(policy, some, "find it, take it, then move it.")
    inspector, shifts, real = editor.inspector, editor.shifts, policy.lay_out
    second, go_on, seen = threading.Event(), threading.Event(), []

    def held(trajectory, *options):
        """The policy's own, but from the second trajectory on it waits for the test."""
        seen.append(trajectory.id)
        if trajectory.id == some[1].id:
            second.set()
            assert go_on.wait(60)
        return real(trajectory, *options)

    monkeypatch.setattr(policy, "lay_out", held)
    editor.text.value = "wait and look around."
    editor.button.click()
    assert second.wait(60)
    assert editor.button.disabled and not editor.stop.disabled and editor.progress.value == 1
    editor.start()  # while it runs, nothing more
    editor.stop.click()
    go_on.set()
    editor.wait(60.0)
    assert set(seen) == {t.id for t in some[:2]}  # the one that was being scored is the last
    assert editor.message.value == "cancelled; nothing has changed"
    assert not editor.button.disabled and editor.stop.disabled
    assert editor.inspector is inspector is editor.children[-1] and editor.shifts is shifts
    editor.button.click()
    editor.wait(60.0)
    assert set(seen) == {t.id for t in some} and editor.progress.value == 4 and editor.message.value == "done"
    assert not editor.button.disabled and editor.stop.disabled
    assert editor.shifts["before"] == shifts["before"] != editor.shifts["after"]
    assert editor.inspector is not inspector and editor.inspector is editor.children[-1]


# --- to take away


def test_svg_parses_and_holds_every_token_of_the_chosen_turns(tmp_path):
    t, words = hostile()
    view = SkillInspector([t], [shifts(t)], skills=[SKILL], policy=words)
    root = ET.fromstring(view.to_svg(tmp_path / "x.svg").read_text())
    assert not root.findall(".//{*}foreignObject") and not root.findall(".//{*}script")
    shown = "".join(e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text"))
    for token in HOSTILE:
        word = visible(token)
        if not re.search(r"\\x(E2|82|F0|9F|98|80|EC|95|88)", word):  # those are halves: shown whole, or by themselves
            assert word in shown, word
    assert "😀" in shown and "안" in shown
    titles = root.findall(".//{*}title")
    values = [v for title in titles for v in (title.text or "").removeprefix("delta ").split(", ")]
    assert len(values) == 2 * len(HOSTILE)
    first = ET.fromstring(view.to_svg(tmp_path / "y.svg", turns=[1]).read_text())
    assert 0 < len(first.findall(".//{*}title")) < len(titles)
    with pytest.raises(ViewError, match="turns: 2 is not one of the 2 turns"):
        view.to_svg(tmp_path / "z.svg", turns=[2])


def test_summary_and_text_are_inert_and_tell_the_state(tmp_path):
    t, words = hostile()
    evil = Skill("</script><img src=x onerror=alert(1)>\u202e")
    view = SkillInspector([t], [shifts(t)], skills=[evil], policy=words)
    summary, text = view.summary(), view.to_text()
    assert "<img" not in summary and "<script" not in summary and "\u202e" not in summary + text
    assert "&lt;/script&gt;&lt;img" in summary and "\x00" not in text + summary
    assert len(text.splitlines()) > 2 * len(HOSTILE)
    page = view.to_html(tmp_path / "x.html").read_text()
    assert page.count("</script>") == 2 and "<img" not in page and "\u2028" not in page
    gone = SkillInspector([t], [None], policy=words)
    assert "No skill reached the teacher" in gone.summary() and "No skill reached" in gone.to_text()
    assert SkillInspector([], None, policy={}).summary() == "<p>Skill inspector: no trajectory to show.</p>"
    with pytest.raises(ViewError, match="no trajectory"):
        SkillInspector([], None, policy={}).frame()


def test_the_mimebundle_has_the_summary_beside_the_view():
    bundle = small()._repr_mimebundle_()
    assert set(bundle) >= {"application/vnd.jupyter.widget-view+json", "text/html"}
    with pytest.raises(ViewError, match="show the inspector first"):
        small().freeze()


def test_the_page_is_small_code():
    code = sum((ROOT / "widgets" / "static" / name).stat().st_size for name in ("inspector.js", "inspector.css"))
    assert code <= 60 * 1024


# --- seedkit inspect


def test_inspect_writes_a_page_from_a_file(tmp_path, capsys):
    assert main(["inspect", str(RIGHT), "-o", str(tmp_path / "all.html")]) == 0
    assert "12 trajectories, a skill reached the teacher in 12" in capsys.readouterr().out
    words = tmp_path / "mine.md"
    words.write_text("find it,\ntake it, then wait.\n")
    name = read_records(RIGHT)[3].trajectory.id
    arguments = ["inspect", str(RIGHT), "--trajectory", name, "--skill", str(words), "-o", str(tmp_path / "one.html")]
    assert main(arguments) == 0
    page = (tmp_path / "one.html").read_text()
    assert "find it, take it, then wait." in page and name in page


def test_inspect_a_run_checks_the_books(tmp_path, capsys):
    records = read_records(RIGHT)
    run = tmp_path / "run"
    given = {"skills": [r.skill for r in records], "shifts": [r.shifts for r in records]}
    for update in (1, 2):
        file = run / "trajectories" / f"{update:04d}.parquet"
        write_trajectories(file, [r.trajectory for r in records], **given)
        ledger = Ledger("sdar", 3.0, 0.2, 500, tuple(float(n) for n in range(12)), (0.5,) * 12)
        write_ledger(file.with_suffix(".json"), ledger)
    load_policy("household-tiny").save(run / "checkpoints" / "last")
    assert main(["inspect", str(run), "-o", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    assert '"method": "sdar"' in page and '"beta": 3.0' in page and '"logged": 0.5' in page
    assert main(["inspect", str(run), "--update", "7", "-o", str(tmp_path / "no.html")]) == 2
    assert "update 7 was not kept; there are 0001, 0002" in capsys.readouterr().err


CHAT = (
    '[{"role": "user", "content": "You see a fridge 1. Your task is to: put some bread in fridge."},'
    ' {"role": "assistant", "content": "go to fridge 1"}]'
)


def test_inspect_scores_other_peoples_rollouts(tmp_path, capsys):
    (tmp_path / "skill.md").write_text("take it, then go to the place.")
    (tmp_path / "others.json").write_text(f"[{CHAT}, {CHAT}, [], 7]")
    arguments = [
        "inspect",
        str(tmp_path / "others.json"),
        "--model",
        "household-tiny",
        "-o",
        str(tmp_path / "p.html"),
    ]
    assert main([*arguments, "--skill", str(tmp_path / "skill.md")]) == 0
    said = capsys.readouterr().out
    assert "2 trajectories, a skill reached the teacher in 2; played by unknown, scored by " in said
    assert "retokenized from messages" in said and "2 skipped: 1 no response, 1 a record should be an object" in said
    page = (tmp_path / "p.html").read_text()
    assert "outcome unknown" in page and "take it, then go to the place." in page
    (data,) = re.findall("id='data'>(.*?)</script>", page)
    json.loads(data, parse_constant=pytest.fail)  # a browser reads no NaN


def test_an_unknown_behaviour_is_the_students_own_and_said_to_be_unknown():
    t = trajectory([((0, 1), (2, 3)), ((4,), (5, 6))])
    shown = shifts(t)
    blank = [replace(turn, behaviour_logp=(math.nan,) * 2, reward=math.nan) for turn in t.turns]
    foreign = replace(t, turns=tuple(blank), reward=math.nan, protocol={"unknown": ["success"]})
    view = SkillInspector([foreign], [shown], skills=[SKILL], policy=WORDS, advantages=[1.0])
    frame, usual = view.frame(), SkillInspector([t], [shown], policy=WORDS, advantages=[1.0]).frame()
    assert frame["behaviour_logp"].isna().all()
    assert np.allclose(frame["student_logp"], shown.student_logp) and np.allclose(frame["weight"], usual["weight"])
    assert np.isfinite(frame["loss"]).all() and np.isfinite(np.frombuffer(view.behaviour, "<f4")).all()
    assert view.meta["trajectories"][0]["turns"][0]["reward"] is None and "outcome unknown" in view.to_text()
    assert advantages_of([foreign, t, foreign, replace(t, reward=0.0)]) == pytest.approx(
        [0, 2**-0.5, 0, -(2**-0.5)], abs=1e-5
    )
    nothing = SkillInspector([foreign], [None], policy=WORDS, advantages=[1.0]).frame()
    assert nothing["student_logp"].isna().all() and nothing["weight"].isna().all()  # nobody scored it: no number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], "no such file or run directory"),
        (["."], "not a run directory with trajectories"),
        ([str(RIGHT), "--trajectory", "13"], "no trajectory '13'; give a number from 1 to 12"),
        ([str(RIGHT), "--skill", "missing.md"], "missing.md: not a text file"),
        ([str(RIGHT), "--skill", "empty.md"], "empty.md: the skill's text is empty"),
        ([str(RIGHT), "--model", "no-such"], "no policy 'no-such'"),
        ([str(RIGHT), "--method", "sead"], "unknown method 'sead'"),
        (["bare.jsonl"], "no shifts are recorded in it; give a skill to score under"),
        (["chat.json"], "other people's rollouts (messages); name the policy that scores them (--model)"),
        (["chat.json", "--model", "household-tiny"], "no shifts are recorded in it; give a skill to score under"),
        (["torn.jsonl"], "torn.jsonl row 1: should be one JSON object"),
        (["notes.txt", "--model", "household-tiny"], "notes.txt: should end in .parquet or .jsonl"),
    ],
)
def test_inspect_says_what_would_be_right(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.md").write_text(" \n")
    write_trajectories(tmp_path / "bare.jsonl", [read_records(RIGHT)[0].trajectory])
    (tmp_path / "chat.json").write_text(CHAT)
    (tmp_path / "torn.jsonl").write_bytes((tmp_path / "bare.jsonl").read_bytes()[:500])
    (tmp_path / "notes.txt").write_text("Nothing to score here.")
    assert main(["inspect", *arguments, "-o", "x.html"]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "x.html").exists()
