"""What one takes away from an inspector: a page, a picture, a text, a summary. Every text in them is escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from seedkit.plots import DOWN, UP

from .signals import ViewError, outcome_of

if TYPE_CHECKING:
    from .inspector import SkillInspector

TOP = 8
"""Tokens in a summary."""
_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp")  # Unicode categories that would hide or reorder text

_SHIM = """
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const state = { ...data.traits };
for (const [name, text] of Object.entries(data.buffers)) state[name] = bytes(text);
const heard = {};
render({ el: document.getElementById("view"), model: {
  get: (name) => state[name],
  set(name, value) {
    if (state[name] === value) return;
    state[name] = value;
    for (const f of heard[`change:${name}`] ?? []) f();
  },
  on: (event, f) => (heard[event] ??= []).push(f),
  off: (event, f) => (heard[event] = (heard[event] ?? []).filter((g) => g !== f)),
  save_changes() {}, send() {},
} });
"""
EXPORT = "export { numbers }; export default { render };"
"""Last line of inspector.js, where another script follows it."""


def visible(raw: bytes) -> str:
    """Bytes as one visible line: what cannot be shown as it is becomes an escape."""
    text = raw.decode("utf-8", "surrogateescape")
    out = []
    for c in text:
        if 0xDC80 <= ord(c) <= 0xDCFF:
            out.append(f"\\x{ord(c) - 0xDC00:02X}")
        elif c in "\n\t":
            out.append({"\n": "↵", "\t": "→"}[c])
        elif unicodedata.category(c) in _HIDDEN:
            out.append(f"\\u{ord(c):04X}" if ord(c) < 0x10000 else f"\\u{{{ord(c):X}}}")
        else:
            out.append(c)
    return "".join(out) or "∅"


def page(view: SkillInspector) -> str:
    """The module and the style sheet with all signals in one file, under a policy that allows nothing else."""
    from .inspector import BUFFERS, STATIC

    module, style = ((STATIC / name).read_text(encoding="utf-8") for name in ("inspector.js", "inspector.css"))
    if module.count(EXPORT) != 1:
        raise RuntimeError("inspector.js should end in its one export line")
    script = module.replace(EXPORT, "") + _SHIM
    style = "body{margin:12px}" + style
    names = [n for n in view.traits(sync=True) if not n.startswith("_") and n not in BUFFERS]
    skipped = {"layout", "tabbable", "tooltip", "comm", "keys", "log"}
    data = {
        "traits": {n: getattr(view, n) for n in names if n not in skipped},
        "buffers": {n: base64.b64encode(getattr(view, n)).decode() for n in BUFFERS},
    }
    inert = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    inert = inert.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").encode("utf-8", "replace").decode()
    allowed = "; ".join(f"{kind}-src 'sha256-{_sha(text)}'" for kind, text in (("script", script), ("style", style)))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; {allowed}; base-uri 'none'\">"
        "<meta name='viewport' content='width=device-width'><title>seedkit: skill inspector</title>"
        f"<style>{style}</style></head><body><div id='view'></div>"
        f"<script type='application/json' id='data'>{inert}</script>"
        f"<script type='module'>{script}</script></body></html>"
    )


def _sha(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def text(view: SkillInspector) -> str:
    """The text twin: heading, skill, then every turn with its sampled tokens, Δ and weight."""
    signals = view.signals
    frame = view.frame()
    t = signals.trajectories[min(view.trajectory, len(signals.trajectories) - 1)]
    lines = [f"{t.id}: {outcome_of(t)}", *_heading(view)]
    at = 0
    for n, turn in enumerate(t.turns):
        lines += ["", f"[turn {n + 1}] {_line(turn.observation)}"]
        for row in frame.iloc[at : at + len(turn.response_ids)].itertuples():
            lines.append(
                f"  {visible(signals.vocabulary[row.token_id]):20} Δ {row.delta:+9.4f}  gate {row.gate:.4f}"
                f"  weight {row.weight:+.6f}  loss {row.loss:+.6f}"
            )
        at += len(turn.response_ids)
    lines += ["", _line(t.final_observation), f"Σ loss {frame['loss'].sum():+.6f}"]
    return "\n".join(lines) + "\n"


def _line(words: str) -> str:
    return visible(" ".join(words.split()).encode("utf-8", "replace")) if words.split() else ""


def _heading(view: SkillInspector) -> list[str]:
    """What a reader has to know beside the tokens: method, skill, state, where the numbers come from."""
    signals, number = view.signals, min(view.trajectory, len(view.signals.trajectories) - 1)
    lines = [f"{view.method}, β {view.beta:g}, λ {view.coef:g}: weight = {view._method().formula}"]
    if view.skill in signals.shifts:
        skill, shifts = signals.skills[view.skill][number], signals.shifts[view.skill][number]
        words = (skill.episode or skill.reason or "") if skill else ""
        count = shifts.skill_tokens if shifts else 0
        lines.append(f"skill {view.skill!r} ({count} tokens reached the teacher): {_line(words)}")
        lines += signals.states[view.skill][number].notes
    return [*lines, " · ".join(view._provenance())]


def summary(view: SkillInspector) -> str:
    """The tokens that the skill moves most, as a table without scripts."""
    signals = view.signals
    if not signals.trajectories:
        return "<p>Skill inspector: no trajectory to show.</p>"
    number = min(view.trajectory, len(signals.trajectories) - 1)
    t, values = signals.trajectories[number], view._numbers(number)
    turns, ids = t.turn_index, t.response_ids
    size = np.nan_to_num(np.abs(values["delta"]), nan=-1.0)
    top = [n for n in np.argsort(-size, kind="stable")[:TOP] if size[n] >= 0]
    cells = [
        f"<tr><td>{turns[n] + 1}</td><td><code>{html.escape(visible(signals.vocabulary[ids[n]]))}"
        f"</code></td><td>{values['delta'][n]:+.4f}</td><td>{values['gate'][n]:.4f}</td>"
        f"<td>{values['weight'][n]:+.6f}</td></tr>"
        for n in top
    ]
    table = (
        f"<table><caption>largest |Δ| of {len(size)} sampled tokens</caption><thead><tr><th>turn</th><th>token</th>"
        f"<th>Δ (nats)</th><th>gate</th><th>weight</th></tr></thead><tbody>{''.join(cells)}</tbody></table>"
    )
    head = "".join(f"<br>{html.escape(line)}" for line in _heading(view))
    return (
        f"<div class='sk-summary'><p><b>Skill inspector</b>, {html.escape(_line(t.id))}: {outcome_of(t)}{head}</p>"
        f"{table if cells else ''}<p><small>Run the cell for the live view.</small></p></div>"
    )


def _columns(text: str) -> int:
    """Cells of a text in a monospaced font."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


class _Paper:
    """Words set in lines of `width` cells, as rect and text elements."""

    em, line = 7.8, 20  # advance and line height of 13 px monospace

    def __init__(self, width: int) -> None:
        self.width, self.x, self.y, self.shapes = width, 0, 1, []

    def put(self, word: str, style: str = "", fill: str = "", title: str = "") -> None:
        """One word, on the next line where this one is full."""
        size = _columns(word)
        if self.x and self.x + size > self.width:
            self.newline()
        left, top, wide = 10 + self.x * self.em, self.y * self.line, size * self.em
        if fill:
            box = f"x='{left:.1f}' y='{top - 14:.1f}' width='{wide:.1f}' height='18'"
            self.shapes.append(f"<rect {box} {fill}><title>{html.escape(title)}</title></rect>")
        at = f"x='{left:.1f}' y='{top:.1f}' textLength='{max(wide, 1):.1f}' lengthAdjust='spacingAndGlyphs'"
        self.shapes.append(f"<text {at} class='{style}' xml:space='preserve'>{html.escape(word)}</text>")
        self.x += size

    def newline(self, lines: float = 1) -> None:
        """Go on at the left, some lines below."""
        self.x, self.y = 0, self.y + lines

    def prose(self, words: str) -> None:
        """A text in grey, broken between words."""
        for word in words.split():
            for part in re.findall(f".{{1,{self.width - 1}}}", word):
                self.put(part, "o")
                self.x += 1
        self.newline()


def svg(view: SkillInspector, turns: Sequence[int] | None = None, *, width: int = 96) -> str:
    """Sampled tokens of some turns with their observations, coloured by the view's channel; plain rect and text."""
    signals, frame = view.signals, view.frame()
    t = signals.trajectories[min(view.trajectory, len(signals.trajectories) - 1)]
    wanted = range(len(t.turns)) if turns is None else turns
    if odd := [n for n in wanted if not 0 <= n < len(t.turns)]:
        raise ViewError(f"turns: {odd[0]} is not one of the {len(t.turns)} turns (counted from 0)")
    channel = view.channel if view.channel in frame else "delta"
    values = frame[channel].to_numpy(float)
    centre = 0.5 if channel == "gate" else 0.0
    known = np.abs(values[np.isfinite(values)] - centre)
    limit = 0.5 if channel == "gate" else float(np.quantile(known, 0.99)) if len(known) else 1.0
    starts = np.cumsum([0, *(len(turn.response_ids) for turn in t.turns)])
    paper = _Paper(width)
    for n in wanted:
        paper.put(f"turn {n + 1}  ", "h")
        paper.prose(_line(t.turns[n].observation))
        for at, word, count in _glyphs([signals.vocabulary[i] for i in t.turns[n].response_ids]):
            own = values[starts[n] + at : starts[n] + at + count]
            mean = float(np.mean(own[np.isfinite(own)])) if np.isfinite(own).any() else np.nan
            paper.put(word, "", _fill(mean - centre, limit), f"{channel} {', '.join(f'{v:+.4f}' for v in own)}")
            paper.x += len(signals.vocabulary.joiner)
        paper.newline(1.6)
    scale = (
        f"{channel}: {centre - limit:.2f} (blue) to {centre + limit:.2f} (orange); hatched: no value; grey: context"
    )
    for words in (scale, *_heading(view)):
        paper.prose(words)
    wide, high = width * paper.em + 20, paper.y * paper.line
    fonts = "ui-monospace,'DejaVu Sans Mono','Noto Sans Mono CJK KR',monospace"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{wide:.0f}' height='{high:.0f}' "
        f"viewBox='0 0 {wide:.0f} {high:.0f}'>"
        f"<style>text{{font:13px {fonts};fill:#161616}}.o{{fill:#6a6a6a}}.h{{fill:#6a6a6a;font-weight:bold}}</style>"
        "<defs><pattern id='na' width='5' height='5' patternUnits='userSpaceOnUse'>"
        "<path d='M0 5L5 0' stroke='#bbb'/></pattern></defs>"
        f"<rect width='100%' height='100%' fill='#fff'/>{''.join(paper.shapes)}</svg>"
    )


def _fill(value: float, limit: float) -> str:
    if not np.isfinite(value):
        return "fill='url(#na)'"
    share = min(1.0, abs(value) / limit) if limit else 0.0
    return f"fill='rgb{UP if value > 0 else DOWN}' fill-opacity='{0.62 * share:.3f}'".replace(", ", ",")


def _glyphs(tokens: Sequence[bytes]) -> list[tuple[int, str, int]]:
    """(first token, visible text, number of tokens): tokens that make a character only together stay together."""
    out, at = [], 0
    while at < len(tokens):
        size, raw = 1, tokens[at]
        while _unfinished(raw) and at + size < len(tokens) and size < 8:
            raw += tokens[at + size]
            size += 1
        if _decodes(raw) is None:
            size, raw = 1, tokens[at]
        out.append((at, visible(raw), size))
        at += size
    return out


def _decodes(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _unfinished(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.end == len(raw) and error.reason == "unexpected end of data"
    return False
