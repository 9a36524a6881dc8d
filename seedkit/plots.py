"""Plotly figures of runs, and token-level shifts as plain, escaped HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from seedkit.evaluate import Row
from seedkit.policy import Policy
from seedkit.types import Shifts, Skill, Trajectory

# Blue lowers, orange raises: safe for the common colour-vision deficiencies.
DOWN, UP = (33, 102, 172), (179, 88, 6)
PALETTE = ("#2166ac", "#b35806", "#1b7837", "#762a83", "#4d4d4d")


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], key: str, title: str, unit: str) -> go.Figure:
    """One metric over updates, a line a run; points where it was measured."""
    figure = go.Figure()
    for n, (name, rows) in enumerate(runs.items()):
        points = [(r["update"], r[key]) for r in rows if key in r]
        if points:
            x, y = zip(*points, strict=True)
            figure.add_scatter(x=x, y=y, name=name, mode="lines+markers", line={"color": PALETTE[n % len(PALETTE)]})
    figure.update_layout(
        title=title, xaxis_title="update", yaxis_title=unit, template="plotly_white", height=320, showlegend=True
    )
    return figure


def bars(rows: Sequence[Row], title: str) -> go.Figure:
    """Success of each result with its 95 % interval."""
    figure = go.Figure()
    figure.add_bar(
        x=[r.name for r in rows],
        y=[100 * r.success.mean for r in rows],
        marker_color=PALETTE[0],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [100 * (r.success.high - r.success.mean) for r in rows],
            "arrayminus": [100 * (r.success.mean - r.success.low) for r in rows],
        },
    )
    figure.update_layout(title=title, yaxis_title="success, %", template="plotly_white", height=340)
    figure.update_yaxes(range=[0, 100])
    return figure


def gate_curve(deltas: Sequence[float], beta: float) -> go.Figure:
    """σ(βΔ) with the given tokens as points on it."""
    import torch

    from seedkit.gate import gate_weights

    edge = max([1.0, *map(abs, deltas)])
    line = torch.linspace(-edge, edge, 201)
    figure = go.Figure()
    figure.add_scatter(x=line.tolist(), y=gate_weights(line, beta=beta).tolist(), name="σ(βΔ)", mode="lines")
    if deltas:
        points = torch.tensor(list(deltas))
        figure.add_scatter(
            x=points.tolist(), y=gate_weights(points, beta=beta).tolist(), mode="markers", name="tokens"
        )
    figure.update_layout(
        title=f"gate, β = {beta:g}", xaxis_title="Δ, nats", yaxis_title="gate", template="plotly_white", height=340
    )
    return figure


def colour(value: float, limit: float) -> str:
    """CSS background of a value on the symmetric scale ±limit (clipped at its ends)."""
    share = max(-1.0, min(1.0, value / limit if limit else 0.0))
    red, green, blue = UP if share > 0 else DOWN
    return f"rgba({red},{green},{blue},{abs(share):.2f})"


def shifts_html(
    policy: Policy, trajectory: Trajectory, shifts: Shifts, skill: Skill | None = None, *, limit: float = 2.0
) -> str:
    """A trajectory turn by turn, sampled tokens coloured by Δ; every text is escaped, no script."""
    out = ["<div style='font-family:ui-monospace,monospace;font-size:13px;line-height:1.7;text-align:left'>"]
    outcome = "success" if trajectory.success else "failure"
    reached = (
        f"{shifts.skill_tokens} skill tokens reached the teacher" if shifts.skill_tokens else "no skill reached it"
    )
    text = skill.episode if skill and skill.ok else f"none ({shifts.reason})"
    out.append(
        f"<p><b>{html.escape(trajectory.task.id)}</b> · {outcome} · {reached}<br>skill: {html.escape(text)}</p>"
    )
    place = 0
    for turn in trajectory.turns:
        out.append(f"<div style='opacity:.55'>{html.escape(turn.observation.strip())}</div><div>&gt; ")
        for token in turn.response_ids:
            delta = shifts.teacher_logp[place] - shifts.student_logp[place]
            word = html.escape(policy.tokenizer.convert_ids_to_tokens(token))
            out.append(
                f"<span style='background:{colour(delta, limit)};border-radius:3px' "
                f"title='Δ {delta:+.3f} nats'>{word}</span> "
            )
            place += 1
        out.append("</div>")
    out.append(f"<div style='opacity:.55'>{html.escape(trajectory.final_observation.strip())}</div></div>")
    return "".join(out)
