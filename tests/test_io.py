"""What is written reads back equal; what is torn or malformed is told in one line."""

import dataclasses
import json
import math

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from seedkit import io
from seedkit.io import DataError, append_jsonl, atomic_write, read_jsonl, read_records, read_trajectories
from seedkit.io import write_trajectories as write
from seedkit.types import Shifts, Skill, Task, Trajectory, Turn

FORMATS = pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
TURN = Turn("You see a mug.", ("look", "take mug"), (1, 2), (3, 4), (-0.1, -1 / 3), "look", True, None, 0.5)
TASK = Task("t1", "household", "train", "pick", {"rooms": [1, 2], "named": {"mug": None, "x": 0.1}})
TRAJECTORY = Trajectory(
    id="a",
    task=TASK,
    turns=(TURN, dataclasses.replace(TURN, valid=False, reason="empty", response_ids=(), behaviour_logp=())),
    success=True,
    reward=1.0,
    policy_version="v0",
    seed=7,
    final_observation="줄\u2028둘\n\r셋 🙂\x00",
    skill=Skill("Look first.", {10: "Open it.", 2: "Go."}),
    protocol={"temperature": 0.4, "max_steps": 30},
)
BARE = Trajectory("b", Task("t2", "search", "test", "qa"), (), False, 0.0, "v0", 0)
SKILL = Skill("Look twice.", {0: "Look."}, author="rule", source="a", policy_version="v0")
SHIFTS = Shifts("a", (3, 4), (0, 0), (-0.1, -1e-17), (-math.pi, -5e-324), (True, False), 9, SKILL.id)


@FORMATS
def test_reads_back_equal(tmp_path, suffix):
    path = tmp_path / f"new/folder/rows{suffix}"
    write(path, [TRAJECTORY, BARE], skills=[SKILL, Skill(reason="null")], shifts=[SHIFTS, None])
    assert read_trajectories(path) == [TRAJECTORY, BARE]
    assert read_records(path) == [(TRAJECTORY, SKILL, SHIFTS), (BARE, Skill(reason="null"), None)]
    skill = read_trajectories(path)[0].skill
    assert skill is not None
    assert all(type(step) is int for step in skill.steps)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # no temporary file is left


@FORMATS
def test_no_rows_and_no_extras(tmp_path, suffix):
    write(tmp_path / f"none{suffix}", [])
    assert read_trajectories(tmp_path / f"none{suffix}") == []
    write(tmp_path / f"one{suffix}", [BARE])
    assert read_records(tmp_path / f"one{suffix}") == [(BARE, None, None)]


@FORMATS
def test_numbers_that_are_not_finite_survive(tmp_path, suffix):
    shifts = dataclasses.replace(SHIFTS, teacher_logp=(math.nan, -math.inf))
    write(tmp_path / f"rows{suffix}", [TRAJECTORY], shifts=[shifts])
    back = read_records(tmp_path / f"rows{suffix}")[0].shifts
    assert back is not None
    assert math.isnan(back.teacher_logp[0])
    assert back.teacher_logp[1] == -math.inf


@FORMATS
def test_datasets_reads_the_rows(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    write(path, [TRAJECTORY, BARE], skills=[SKILL, None], shifts=[SHIFTS, None])
    kind = "parquet" if suffix == ".parquet" else "json"
    rows = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["id"] == ["a", "b"]
    assert rows[0]["turns"][0]["behaviour_logp"] == [-0.1, -1 / 3]
    assert rows[0]["shifts"]["response_ids"] == [3, 4]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ints = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | ints | floats | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)
)
json_dicts = st.dictionaries(texts, json_values, max_size=3)
maybe = st.none() | texts
skills = st.builds(Skill, texts, st.dictionaries(ints, texts, max_size=3), texts, maybe, maybe, maybe)


@st.composite
def any_turn(draw):
    tokens = draw(st.lists(st.tuples(ints, floats), max_size=4))
    ids, logp = zip(*tokens, strict=True) if tokens else ((), ())
    admissible, context = draw(st.none() | st.lists(texts, max_size=2).map(tuple)), draw(st.lists(ints, max_size=3))
    action, valid, reason, reward = draw(st.tuples(texts, st.booleans(), st.none() | texts, floats))
    return Turn(draw(texts), admissible, tuple(context), ids, logp, action, valid, reason, reward)


trajectories = st.builds(
    Trajectory,
    id=texts,
    task=st.builds(Task, texts, texts, texts, texts, json_dicts),
    turns=st.lists(any_turn(), max_size=3).map(tuple),
    success=st.booleans(),
    reward=floats,
    policy_version=texts,
    seed=ints,
    final_observation=texts,
    truncated=st.booleans(),
    skill=st.none() | skills,
    protocol=json_dicts,
)


@FORMATS
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # beartype picks the items it checks by it
@settings(
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # shrinking such large examples takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
@given(rows=st.lists(st.tuples(trajectories, st.none() | skills), max_size=3))
def test_any_trajectory_reads_back_equal(tmp_path_factory, suffix, rows):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    write(path, [row[0] for row in rows], skills=[row[1] for row in rows])
    assert read_records(path) == [(*row, None) for row in rows]


def spoilt(record, **fields):
    """A copy with fields that its own constructor may refuse."""
    copy = dataclasses.replace(record)
    for name, value in fields.items():
        object.__setattr__(copy, name, value)
    return copy


UNWRITABLE = [
    ("list for tuple", {"turns": [TURN]}, "turns should be a tuple"),
    ("tuple in the spec", {"task": spoilt(TASK, spec={"a": (1, 2)})}, "task should be what a file can hold"),
    ("integer key in the spec", {"task": spoilt(TASK, spec={1: 2})}, "task should be what a file can hold"),
    (
        "object in the protocol",
        {"protocol": {"path": object()}},
        "protocol should be a dictionary that JSON can hold",
    ),
    ("list as protocol", {"protocol": []}, "protocol should be a dict, is []"),
    ("no reward", {"reward": None}, "reward should be a number, is None"),
    (
        "array of log-probs",
        {"turns": (spoilt(TURN, behaviour_logp=np.zeros(2)),)},
        "turns[0].behaviour_logp should be",
    ),
    ("numpy float32", {"reward": np.float32(1)}, "reward should be a number"),
    ("fewer log-probs than tokens", {"turns": (spoilt(TURN, behaviour_logp=(0.0,)),)}, "should be 2 long"),
    ("seed of 65 bits", {"seed": 2**64}, "seed should be a 64-bit integer"),
    ("boolean seed", {"seed": True}, "seed should be a 64-bit integer"),
    ("lone surrogate", {"final_observation": "a\ud800"}, "final_observation should be text without lone surrogates"),
    ("surrogate in the spec", {"task": spoilt(TASK, spec={"a": "\udc00"})}, "task.spec should be text without"),
    ("a string as skill", {"skill": "Look."}, "skill should be a Skill, is 'Look.'"),
    ("step in words", {"skill": spoilt(SKILL, steps={"3": "Look."})}, "skill.steps[0].turn should be an integer"),
]


@FORMATS
@pytest.mark.parametrize(("fields", "message"), [pytest.param(f, m, id=kind) for kind, f, m in UNWRITABLE])
def test_what_would_not_read_back_is_not_written(tmp_path, suffix, fields, message):
    path = tmp_path / f"rows{suffix}"
    write(path, [BARE])
    with pytest.raises(DataError) as error:
        write(path, [BARE, spoilt(TRAJECTORY, **fields)])
    assert f"rows{suffix} row 2: " in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert read_trajectories(path) == [BARE]


WRONG_SHIFTS = [
    ("of another trajectory", {"trajectory": "z"}, "shifts.trajectory should be 'a', is 'z'"),
    ("of other tokens", {"response_ids": (3, 5)}, "shifts.response_ids should be the trajectory's sampled tokens"),
    ("mask too short", {"mask": (True,)}, "shifts.mask should be 2 long"),
    ("mask of integers", {"mask": (1, 0)}, "shifts.mask[0] should be true or false, is 1"),
]


@pytest.mark.parametrize(("fields", "message"), [pytest.param(f, m, id=kind) for kind, f, m in WRONG_SHIFTS])
def test_wrong_shifts(tmp_path, fields, message):
    with pytest.raises(DataError, match="row 1") as error:
        write(tmp_path / "rows.jsonl", [TRAJECTORY], shifts=[spoilt(SHIFTS, **fields)])
    assert message in str(error.value)


def test_lists_of_different_lengths(tmp_path):
    with pytest.raises(DataError, match="1 trajectories, but 2 skills"):
        write(tmp_path / "rows.jsonl", [BARE], skills=[None, None])
    with pytest.raises(DataError, match="1 trajectories, but 0 shifts"):
        write(tmp_path / "rows.jsonl", [BARE], shifts=[])


def turn(row):
    return row["turns"][0]


def steps(row):
    return row["skill"]["steps"]


MALFORMED = [  # what happens to the second row of a good file, and a part of the message
    ("field missing", lambda row: row.pop("seed"), "seed should be there, is None"),
    ("field unknown", lambda row: row.update(score=1), "score should be left out, is 1"),
    ("nested field missing", lambda row: turn(row).pop("action"), "turns[0].action should be there, is None"),
    ("null", lambda row: row.update(reward=None), "reward should be a number, is None"),
    ("text for number", lambda row: row.update(reward="1"), "reward should be a number, is '1'"),
    ("fraction for integer", lambda row: row.update(seed=0.5), "seed should be an integer, is 0.5"),
    ("number for boolean", lambda row: row.update(success=1), "success should be true or false, is 1"),
    ("text for tokens", lambda row: turn(row).update(response_ids="ab"), "response_ids should be a list, is 'ab'"),
    ("null token", lambda row: turn(row)["response_ids"].append(None), "response_ids[2] should be an integer"),
    ("log-prob lost", lambda row: turn(row)["behaviour_logp"].pop(), "turns[0].behaviour_logp should be 2 long"),
    ("task as text", lambda row: row.update(task="t1"), "task should be a dict, is 't1'"),
    ("spec as an object", lambda row: row["task"].update(spec={}), "task.spec should be text, is {}"),
    ("spec not JSON", lambda row: row["task"].update(spec="{'a': 1}"), "task.spec should be JSON text, is"),
    ("spec a list", lambda row: row["task"].update(spec="[]"), "task.spec should be a dict, is []"),
    ("step twice", lambda row: steps(row).append({"turn": 2, "text": ""}), "skill.steps should be one text a turn"),
    ("step key as text", lambda row: steps(row)[0].update(turn="2"), "skill.steps[0].turn should be an integer"),
]


@pytest.mark.parametrize(("spoil", "message"), [pytest.param(s, m, id=kind) for kind, s, m in MALFORMED])
def test_malformed_rows(tmp_path, spoil, message):
    path = tmp_path / "rows.jsonl"
    write(path, [BARE, TRAJECTORY])
    rows = read_jsonl(path).rows
    spoil(rows[1])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as error:
        read_trajectories(path)
    assert str(error.value).startswith(f"{path} row 2: ")
    assert message in str(error.value)


FILES = [
    ("not JSON", "rows.jsonl", b"id: a\n", "row 1: should be one JSON object (Expecting value"),
    ("not an object", "rows.jsonl", b"[1]\n", "row 1: should be one JSON object, is [1]"),
    ("blank line", "rows.jsonl", b"\n", "row 1: should be one JSON object"),
    ("not UTF-8", "rows.jsonl", b'{"id": "\xff"}\n', "row 1: should be one JSON object ('utf-8' codec"),
    ("torn", "rows.jsonl", b'{"id": "a', 'row 1: should be one JSON object, is \'{"id": "a\''),
    ("not Parquet", "rows.parquet", b"PAR0 and so on", "should be a Parquet file (Parquet magic bytes"),
    ("empty Parquet", "rows.parquet", b"", "should be a Parquet file (Parquet file size is 0 bytes"),
    ("another kind", "rows.csv", b"id\na\n", "should end in .parquet or .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "message"), [pytest.param(*case, id=kind) for kind, *case in FILES])
def test_malformed_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        read_trajectories(tmp_path / name)
    assert str(error.value).startswith(f"{tmp_path / name}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_parquet_of_another_schema(tmp_path):
    pq.write_table(pa.table({"id": ["a"], "score": [1.0]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet row 1: final_observation should be there, is None"):
        read_trajectories(tmp_path / "rows.parquet")


def test_torn_parquet(tmp_path):
    write(tmp_path / "rows.parquet", [TRAJECTORY])
    content = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="should be a Parquet file"):
        read_trajectories(tmp_path / "rows.parquet")


def test_a_file_that_is_not_there(tmp_path):
    for name in ("rows.parquet", "rows.jsonl"):
        with pytest.raises(FileNotFoundError):
            read_trajectories(tmp_path / name)


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    atomic_write(tmp_path / "a.json", "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(io.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_jsonl_grows_line_by_line(tmp_path):
    rows = [{"step": n, "note": "줄\n\u2028", "loss": 1 / (n + 1)} for n in range(3)]
    for row in rows:
        append_jsonl(tmp_path / "metrics.jsonl", row)
    assert read_jsonl(tmp_path / "metrics.jsonl") == (rows, None)
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("left", range(1, 23))
def test_a_torn_last_line_is_reported_and_then_replaced(tmp_path, left):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 0})
    line = '{"step": 1, "a": "줄"}\n'.encode()
    with open(path, "ab") as file:
        file.write(line[:left])
    whole = left >= len(line) - 1  # all but the line's end is enough
    rows, torn = read_jsonl(path)
    assert rows == [{"step": 0}] + [{"step": 1, "a": "줄"}] * whole
    assert (torn is None) == whole
    append_jsonl(path, {"step": 2})
    assert read_jsonl(path) == ([*rows, {"step": 2}], None)


def test_a_bad_line_before_the_last_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl row 2: should be one JSON object \(Expecting ':' delimiter"):
        read_jsonl(tmp_path / "metrics.jsonl")


def test_a_lone_surrogate_does_not_stop_the_log(tmp_path):
    append_jsonl(tmp_path / "log.jsonl", {"text": "\\\ud800"})
    assert read_jsonl(tmp_path / "log.jsonl").rows == [{"text": "\\\ud800"}]


def test_a_ledger_reads_back_equal_and_a_wrong_one_names_its_field(tmp_path):
    path, ledger = tmp_path / "0001.json", io.Ledger("seed", 5.0, 0.01, 12, (1.0, -1 / 3), (0.25, -1e-17))
    io.write_ledger(path, ledger)
    assert io.read_ledger(path) == ledger
    path.write_text(path.read_text().replace('"tokens": 12', '"tokens": "12"'))
    with pytest.raises(DataError, match=r"0001\.json: tokens should be an integer"):
        io.read_ledger(path)
    path.write_text("[]")
    with pytest.raises(DataError, match="one JSON object"):
        io.read_ledger(path)
