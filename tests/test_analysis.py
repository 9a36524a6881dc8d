"""One case a kind of analyzer output; every failure has its own reason and none raises."""

import json

import pytest

from seedkit import analysis
from seedkit.analysis import EXAMPLE, parse_analysis
from seedkit.types import Skill

GOOD = '{"episode_skill": "Check the desk first.", "step_skills": {"3": "Open the drawer."}}'
SKILL = Skill(episode="Check the desk first.", steps={3: "Open the drawer."})
ONE = '{"episode_skill": %s, "step_skills": {}}'  # the episode's value is what the case is about
DRAFT = ONE % '"A draft."'
STEP = '{"episode_skill": "Look.", "step_skills": {"%s": "Open the drawer."}}'

VALID = [
    ("plain", GOOD, SKILL),
    ("whitespace around", f"\n {GOOD}\t\n", SKILL),
    ("short keys", '{"episode": "Check the desk first.", "steps": {"3": "Open the drawer."}}', SKILL),
    ("other order", '{"step_skills": {"3": "Open the drawer."}, "episode_skill": "Check the desk first."}', SKILL),
    ("fence", f"```json\n{GOOD}\n```", SKILL),
    ("fence in capitals", f"```JSON\n{GOOD}```", SKILL),
    ("reasoning", f"<think>It failed at the drawer.</think>\n{GOOD}", SKILL),
    ("reasoning and fence", f"<think>\n</think>\n\n```json\n{GOOD}\n```", SKILL),
    ("draft in the reasoning", f"<think>{DRAFT}</think>{GOOD}", SKILL),
    ("long reasoning", f"<think>{'so ' * 2000}</think>{GOOD}", SKILL),
    ("no steps", ONE % '"Look."', Skill(episode="Look.")),
    ("no steps key", '{"episode_skill": "Look."}', Skill(episode="Look.")),
    ("first step", STEP % 0, Skill(episode="Look.", steps={0: "Open the drawer."})),
    ("last step", STEP % 9, Skill(episode="Look.", steps={9: "Open the drawer."})),
    ("escaped newline", ONE % r'"  Look\n\tfirst. "', Skill(episode="Look first.")),
    ("Korean, emoji", ONE % '"책상을 먼저 확인하세요 🙂"', Skill(episode="책상을 먼저 확인하세요 🙂")),
    ("escaped emoji", ONE % r'"Look \ud83d\ude42"', Skill(episode="Look 🙂")),
    ("less and greater", ONE % '"Act if 1 < x and x > 0."', Skill(episode="Act if 1 < x and x > 0.")),
    ("a fence in the advice", ONE % '"Write ``` around code."', Skill(episode="Write ``` around code.")),
]

INVALID = [
    ("None", None, analysis.NOT_TEXT),
    ("object, not text", json.loads(GOOD), analysis.NOT_TEXT),
    ("bytes", GOOD.encode(), analysis.NOT_TEXT),
    ("nothing", "", analysis.EMPTY),
    ("whitespace", " \n ", analysis.EMPTY),
    ("only reasoning", f"<think>{GOOD}</think>", analysis.EMPTY),
    ("empty fence", "```json\n```", analysis.EMPTY),
    ("empty advice", ONE % '""', analysis.EMPTY),
    ("whitespace advice", ONE % r'" \n "', analysis.EMPTY),
    ("advice without a word", ONE % '"--"', analysis.EMPTY),
    ("zero-width advice", ONE % r'"\u200b"', analysis.EMPTY),
    ("null as advice", ONE % '"None."', analysis.EMPTY),
    ("empty step", STEP.replace("Open the drawer.", " ") % 1, analysis.EMPTY),
    ("reasoning never closed", f"<think>so {GOOD}", analysis.UNCLOSED_THINK),
    ("too long", ONE % f'"{"look " * 500}"', analysis.TOO_LONG),
    ("null", "null", analysis.NULL),
    ("fenced null", "```json\nnull\n```", analysis.NULL),
    ("prose", "Check the desk first.", analysis.NOT_JSON),
    ("prose before", f"Here it is: {GOOD}", analysis.NOT_JSON),
    ("end of reasoning without its start", f"so</think>{GOOD}", analysis.NOT_JSON),
    ("two blocks of reasoning", f"<think>a</think><think>b</think>{GOOD}", analysis.NOT_JSON),
    ("another fence", f"```python\n{GOOD}\n```", analysis.NOT_JSON),
    ("Python's None", ONE % "None", analysis.NOT_JSON),
    ("unquoted keys", "{episode_skill: 1}", analysis.NOT_JSON),
    ("comma before the brace", '{"episode_skill": "Look.", "step_skills": {},}', analysis.NOT_JSON),
    ("string", '"Look."', analysis.NOT_OBJECT),
    ("list", f"[{GOOD}]", analysis.NOT_OBJECT),
    ("number", "3", analysis.NOT_OBJECT),
    ("boolean", "true", analysis.NOT_OBJECT),
    ("single quotes", GOOD.replace('"', "'"), analysis.SINGLE_QUOTES),
    ("single quotes inside", ONE % "'Look.'", analysis.SINGLE_QUOTES),
    ("cut off in a string", GOOD[:30], analysis.TRUNCATED),
    ("cut off after a comma", GOOD[: GOOD.index(",") + 1], analysis.TRUNCATED),
    ("cut off at the last brace", GOOD[:-1], analysis.TRUNCATED),
    ("only a brace", "{", analysis.TRUNCATED),
    ("fence never closed", f"```json\n{GOOD}", analysis.TRUNCATED),
    ("two objects", f"{GOOD}\n{GOOD}", analysis.TWO_OBJECTS),
    ("two fences", f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```", analysis.TWO_OBJECTS),
    ("prose after", f"{GOOD} I hope this helps.", analysis.TEXT_AFTER),
    ("prose after the fence", f"```json\n{GOOD}\n```\nDone.", analysis.TEXT_AFTER),
    ("reasoning after", f"{GOOD}<think>a</think>", analysis.TEXT_AFTER),
    ("key twice", '{"episode_skill": "Look.", "episode_skill": "Go.", "step_skills": {}}', analysis.DUPLICATE_KEY),
    ("both names", '{"episode_skill": "Look.", "episode": "Go.", "step_skills": {}}', analysis.DUPLICATE_KEY),
    ("step twice", GOOD.replace("}}", ', "3": "Go."}}'), analysis.DUPLICATE_KEY),
    ("NaN", "NaN", analysis.NOT_FINITE),
    ("infinite advice", ONE % "-Infinity", analysis.NOT_FINITE),
    ("deep nesting", "[" * 1900 + "]" * 10, (analysis.TOO_DEEP, analysis.NOT_JSON)),  # by the interpreter's own limit
    ("no keys", "{}", analysis.MISSING_KEY),
    ("no episode key", '{"step_skills": {"3": "Open the drawer."}}', analysis.MISSING_KEY),
    ("one key too many", GOOD.replace("}}", '}, "score": 1}'), analysis.UNKNOWN_KEY),
    ("key in capitals", GOOD.replace("episode_skill", "Episode_Skill"), analysis.UNKNOWN_KEY),
    ("null advice", ONE % "null", analysis.WRONG_TYPE),
    ("number as advice", ONE % "3", analysis.WRONG_TYPE),
    ("list as advice", ONE % '["Look."]', analysis.WRONG_TYPE),
    ("list of steps", '{"episode_skill": "Look.", "step_skills": ["Open the drawer."]}', analysis.WRONG_TYPE),
    ("null steps", '{"episode_skill": "Look.", "step_skills": null}', analysis.WRONG_TYPE),
    ("number as step advice", '{"episode_skill": "Look.", "step_skills": {"3": 4}}', analysis.WRONG_TYPE),
    ("step in words", STEP % "step 3", analysis.STEP_KEY),
    ("negative step", STEP % -1, analysis.STEP_KEY),
    ("fractional step", STEP % 3.0, analysis.STEP_KEY),
    ("step with a zero before", STEP % "03", analysis.STEP_KEY),
    ("superscript step", STEP % "³", analysis.STEP_KEY),
    ("Arabic digit as step", STEP % "٣", analysis.STEP_KEY),
    ("empty step key", STEP % "", analysis.STEP_KEY),
    ("huge step", STEP % ("9" * 100), analysis.STEP_KEY),
    ("step past the end", STEP % 10, analysis.STEP_RANGE),
    ("raw newline in a string", ONE % '"Look\nfirst."', analysis.CONTROL),
    ("escaped control character", ONE % r'"Look\u0007"', analysis.CONTROL),
    ("escaped lone surrogate", ONE % r'"Look \ud83d"', analysis.SURROGATE),
    ("raw lone surrogate", ONE % '"Look \udc00"', analysis.SURROGATE),
    ("the prompt's example", EXAMPLE, analysis.PLACEHOLDER),
    ("half of the example", ONE % json.dumps(json.loads(EXAMPLE)["episode_skill"]), analysis.PLACEHOLDER),
    ("dots", ONE % '"..."', analysis.PLACEHOLDER),
    ("ellipsis", ONE % '"Look …"', analysis.PLACEHOLDER),
    ("gap", ONE % '"<one rule for the episode>"', analysis.PLACEHOLDER),
]


@pytest.mark.parametrize(("text", "skill"), [pytest.param(t, s, id=kind) for kind, t, s in VALID])
def test_valid(text, skill):
    parsed = parse_analysis(text, turns=10)
    assert parsed.ok
    assert parsed == skill


@pytest.mark.parametrize(("text", "reason"), [pytest.param(t, r, id=kind) for kind, t, r in INVALID])
def test_invalid(text, reason):
    parsed = parse_analysis(text, turns=10)
    assert not parsed.ok
    assert parsed in [Skill(reason=r) for r in ([reason] if isinstance(reason, str) else reason)]


def test_every_reason_has_a_case():
    tried = {r for _, _, reason in INVALID for r in ([reason] if isinstance(reason, str) else reason)}
    assert tried == set(analysis.REASONS)


def test_steps_are_not_limited_when_the_length_is_not_known():
    assert parse_analysis(STEP % 10).steps == {10: "Open the drawer."}
    assert parse_analysis(STEP % 0, turns=0).reason == analysis.STEP_RANGE


@pytest.mark.parametrize("end", range(len(GOOD)))
def test_no_prefix_of_an_analysis_is_an_analysis(end):
    assert parse_analysis(GOOD[:end]).reason in (analysis.EMPTY, analysis.TRUNCATED)
