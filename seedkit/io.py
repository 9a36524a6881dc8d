"""Trajectories, skills and shifts as rows of Parquet or JSONL that read back equal; files that survive a kill.

One row a trajectory: the fields of `types.Trajectory`, and beside them `hindsight` (the skill written about it) and
`shifts` (what that skill did to its tokens), null where there is none. Dictionaries of any content (task spec,
protocol) are JSON text, so that all rows share one schema; it follows `types.py` by itself. Reading is strict: a
missing, unknown or mistyped field is a `DataError`, never a default. Weights are not written here.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from seedkit.types import Shifts, Skill, Trajectory


class DataError(ValueError):
    """A file or record that cannot be used: one line with the place, the field and what would be right."""


class Record(NamedTuple):
    """A row: a trajectory, the skill written about it in hindsight, and what that skill did to its tokens."""

    trajectory: Trajectory
    skill: Skill | None = None
    shifts: Shifts | None = None


class JsonLines(NamedTuple):
    """The rows of a file that only ever grows, and its last line when a kill tore it (else None)."""

    rows: list[dict[str, Any]]
    torn: str | None


@dataclass(frozen=True)
class Ledger:
    """What an update made of its batch, written beside its trajectories: the inspector checks the books with it."""

    method: str
    """Name of the method."""
    beta: float
    """Gate steepness, 1/nat."""
    coef: float
    """λ."""
    tokens: int
    """Response tokens of the batch: the denominator of its losses."""
    advantage: tuple[float, ...]
    """A of each trajectory, reward sd."""
    loss: tuple[float, ...]
    """Each trajectory's share of loss_policy + loss_distill; they add up to the batch's."""


def write_ledger(path: str | os.PathLike[str], ledger: Ledger) -> None:
    """Write a ledger as JSON, all or nothing."""
    atomic_write(path, json.dumps(vars(ledger)) + "\n")


def read_ledger(path: str | os.PathLike[str]) -> Ledger:
    """A ledger as it was written. Raises `DataError`."""
    try:
        return _decode(read_object(path), Ledger)
    except _Wrong as wrong:
        raise DataError(f"{path}: {wrong}") from None


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object that a file holds. Raises `DataError`."""
    return _object(Path(path).read_bytes(), str(path))


def write_trajectories(
    path: str | os.PathLike[str],
    trajectories: Sequence[Trajectory],
    *,
    skills: Sequence[Skill | None] | None = None,
    shifts: Sequence[Shifts | None] | None = None,
) -> None:
    """Write one row a trajectory to `path` (`.parquet` or `.jsonl`), all or nothing.

    Args:
        path: the file; its folder is made, an older file is replaced.
        trajectories: in any number.
        skills: the hindsight skill of each trajectory, or None where there is none.
        shifts: the shifts of each trajectory, or None where there are none.

    Raises:
        DataError: a record that would not read back equal, or lists of different lengths.
    """
    as_parquet = _is_parquet(path)
    for name, beside in (("skills", skills), ("shifts", shifts)):
        if beside is not None and len(beside) != len(trajectories):
            raise DataError(f"{path}: {len(trajectories)} trajectories, but {len(beside)} {name}")
    nothing = [None] * len(trajectories)
    rows = []
    for n, record in enumerate(zip(trajectories, skills or nothing, shifts or nothing, strict=True), 1):
        try:
            rows.append(_to_row(*record))
        except _Wrong as wrong:
            raise DataError(f"{path} row {n}: {wrong}") from None
    atomic_write(path, _parquet(rows) if as_parquet else b"".join(map(_line, rows)))


def read_trajectories(path: str | os.PathLike[str]) -> list[Trajectory]:
    """The trajectories of a file from `write_trajectories`, equal to those written. Raises `DataError`."""
    return [record.trajectory for record in read_records(path)]


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The trajectories of a file with the skill and the shifts written beside each. Raises `DataError`."""
    records = []
    for n, row in enumerate(_rows(path), 1):
        try:
            records.append(_from_row(row))
        except _Wrong as wrong:
            raise DataError(f"{path} row {n}: {wrong}") from None
    return records


def atomic_write(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a whole file: a reader, or a kill at any moment, meets the old content or the new, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_jsonl(path: str | os.PathLike[str], row: dict[str, Any]) -> None:
    """Add one line. A last line that a kill tore is removed first, so that it never ends up between good ones."""
    line = _line(row)
    with open(path, "a+b", buffering=0) as file:
        content = Path(path).read_bytes() if file.tell() else b""
        if content and not content.endswith(b"\n"):
            whole = read_jsonl(path).torn is None
            file.truncate(len(content) if whole else content.rfind(b"\n") + 1)
            line = b"\n" + line if whole else line
        file.write(line)


def read_jsonl(path: str | os.PathLike[str]) -> JsonLines:
    """All rows of a JSONL file. A torn last line is reported, any other bad line is a `DataError`."""
    *lines, tail = Path(path).read_bytes().split(b"\n")
    rows = [_object(line, f"{path} row {n}") for n, line in enumerate(lines, 1)]
    if not tail:
        return JsonLines(rows, None)
    try:
        return JsonLines([*rows, _object(tail, str(path))], None)
    except DataError:
        return JsonLines(rows, tail.decode(errors="replace"))


# One row


class _Wrong(Exception):
    """A value that is not what its field holds. The path to the field grows while the error travels up."""

    def __init__(self, should: str, value: Any, path: str = "") -> None:
        self.should, self.value, self.path = should, value, path

    def __str__(self) -> str:
        return f"{self.path.lstrip('.') or 'row'} should be {self.should}, is {reprlib.repr(self.value)}"


@dataclass(frozen=True)
class _Row(Trajectory):
    """The columns of a file: a trajectory and what is written beside it."""

    hindsight: Skill | None = None
    shifts: Shifts | None = None


@dataclass(frozen=True)
class _Step:
    """One entry of `Skill.steps` in a file: neither JSON nor `datasets` has dictionaries with integer keys."""

    turn: int
    text: str


_STEPS = tuple[_Step, ...]
_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false", tuple: "a tuple", list: "a list"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_hints = cache(typing.get_type_hints)


def _to_row(trajectory: Trajectory, skill: Skill | None, shifts: Shifts | None) -> dict[str, Any]:
    """The row, read again at once to make sure that it comes back equal."""
    written = vars(_typed(trajectory, Trajectory)) | {"hindsight": skill, "shifts": shifts}
    row = _each(((name, written[name], hint) for name, hint in _hints(_Row).items()), _encode)
    read = _decode(row, _Row)
    for name, before in written.items():
        if (before,) != (getattr(read, name),):  # in a tuple, so that NaN is itself
            raise _Wrong(f"what a file can hold ({reprlib.repr(getattr(read, name))})", before, name)
    _check_lengths(read)
    return row


def _from_row(row: Any) -> Record:
    read = _decode(row, _Row)
    _check_lengths(read)
    trajectory = Trajectory(**{name: getattr(read, name) for name in _hints(Trajectory)})
    return Record(trajectory, read.hindsight, read.shifts)


def _check_lengths(row: _Row) -> None:
    """One log-probability a token, and shifts of this very trajectory."""
    for n, turn in enumerate(row.turns):
        if len(turn.behaviour_logp) != len(turn.response_ids):
            raise _Wrong(f"{len(turn.response_ids)} long", turn.behaviour_logp, f"turns[{n}].behaviour_logp")
    if row.shifts is None:
        return
    if row.shifts.trajectory != row.id:
        raise _Wrong(repr(row.id), row.shifts.trajectory, "shifts.trajectory")
    if row.shifts.response_ids not in ((), row.response_ids):
        raise _Wrong("the trajectory's sampled tokens", row.shifts.response_ids, "shifts.response_ids")
    for name in ("turn", "student_logp", "teacher_logp", "mask"):
        if len(getattr(row.shifts, name)) != len(row.shifts.response_ids):
            raise _Wrong(f"{len(row.shifts.response_ids)} long", getattr(row.shifts, name), f"shifts.{name}")


def _each(parts: Iterable[tuple[Any, Any, Any]], convert: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """Convert (key, value, type) one by one; an error learns the key it happened under."""
    out = {}
    for key, value, hint in parts:
        try:
            out[key] = convert(value, hint)
        except _Wrong as wrong:
            wrong.path = (f".{key}" if isinstance(key, str) else f"[{key}]") + wrong.path
            raise
    return out


def _encode(value: Any, hint: Any) -> Any:
    """A value of type `hint` in lists, dictionaries and JSON text; its scalars are left to `_decode` to check."""
    args = typing.get_args(hint)
    if type(None) in args:
        return None if value is None else _encode(value, args[0])
    if is_dataclass(hint):
        _typed(value, hint)
        return _each(((name, getattr(value, name), part) for name, part in _hints(hint).items()), _encode)
    if hint == dict[int, str]:
        return [{"turn": turn, "text": text} for turn, text in _typed(value, dict).items()]
    if hint == dict[str, Any]:
        try:
            return json.dumps(_typed(value, dict), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            raise _Wrong("a dictionary that JSON can hold", value) from None
    if args:
        return list(_each(((n, part, args[0]) for n, part in enumerate(_typed(value, tuple))), _encode).values())
    return value


def _decode(value: Any, hint: Any) -> Any:
    """The inverse of `_encode`, where every value has to be of its type."""
    args = typing.get_args(hint)
    if type(None) in args:
        return None if value is None else _decode(value, args[0])
    if isinstance(hint, type) and is_dataclass(hint):
        hints = _hints(hint)
        if odd := sorted(_typed(value, dict).keys() ^ hints.keys()):
            raise _Wrong("there" if odd[0] in hints else "left out", value.get(odd[0]), f".{odd[0]}")
        return hint(**_each(((name, value[name], part) for name, part in hints.items()), _decode))
    if hint == dict[int, str]:
        steps = {step.turn: step.text for step in _decode(value, _STEPS)}
        if len(steps) < len(value):
            raise _Wrong("one text a turn", value)
        return steps
    if hint == dict[str, Any]:
        try:
            return _typed(json.loads(_scalar(value, str)), dict)
        except (ValueError, RecursionError):
            raise _Wrong("JSON text", value) from None
    if args:
        return tuple(_each(((n, part, args[0]) for n, part in enumerate(_typed(value, list))), _decode).values())
    return _scalar(value, hint)


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise _Wrong(_NAMES.get(kind, f"a {kind.__name__}"), value)
    return value


def _scalar(value: Any, kind: Any) -> Any:
    """A text that UTF-8 can hold, a 64-bit integer, a float or a boolean, and nothing that merely resembles one."""
    if kind is float and type(value) is int and abs(value) <= 2**53:
        return float(value)
    if kind is int and (isinstance(value, bool) or not -(2**63) <= _typed(value, int) < 2**63):
        raise _Wrong("a 64-bit integer", value)
    if kind is str and _SURROGATE.search(_typed(value, str)):
        raise _Wrong("text without lone surrogates", value)
    return _typed(value, kind)


# Files


def _arrow(hint: Any) -> pa.DataType:
    """The Arrow type of what `_encode` makes."""
    args = typing.get_args(hint)
    if type(None) in args:
        return _arrow(args[0])
    if is_dataclass(hint):
        return pa.struct([(name, _arrow(part)) for name, part in _hints(hint).items()])
    if hint == dict[int, str]:
        return _arrow(_STEPS)
    if hint == dict[str, Any]:
        return pa.string()
    return pa.list_(_arrow(args[0])) if args else _ARROW[hint]


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = pa.BufferOutputStream()
    schema = pa.schema([(name, _arrow(hint)) for name, hint in _hints(_Row).items()])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer)
    return buffer.getvalue().to_pybytes()


def _line(row: dict[str, Any]) -> bytes:
    """JSON on one line. A lone surrogate becomes its JSON escape; NaN and Infinity are as Python reads them."""
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: should be one JSON object ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: should be one JSON object, is {reprlib.repr(row)}")
    return row


def _rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    if _is_parquet(path):
        try:
            return pq.ParquetFile(path).read().to_pylist()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{path}: should be a Parquet file ({str(error).splitlines()[0]})") from None
    rows, torn = read_jsonl(path)
    if torn is not None:
        raise DataError(f"{path} row {len(rows) + 1}: should be one JSON object, is {reprlib.repr(torn)}")
    return rows


def _is_parquet(path: str | os.PathLike[str]) -> bool:
    if Path(path).suffix not in (".parquet", ".jsonl"):
        raise DataError(f"{path}: should end in .parquet or .jsonl")
    return Path(path).suffix == ".parquet"
