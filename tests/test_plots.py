"""Figures of comparisons: what is drawn is what was found, and it leaves the notebook as CSV, SVG and PDF."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from test_experiment import FEW

from seedkit import plots
from seedkit.experiment import summary
from seedkit.plots import PlotError, comparison_figures, data_efficiency, save_figure, sensitivity


def drawn(figure, tmp_path, monkeypatch) -> list[dict[str, str]]:
    monkeypatch.setattr(type(figure), "to_image", lambda self, format: b"")
    (table, *_) = save_figure(figure, tmp_path / "figure")
    return list(csv.DictReader(table.read_text().splitlines()))


def test_curves_are_means_with_their_standard_errors(tmp_path, monkeypatch):
    runs = [replace(o, curves={"success": [value, None, 0.5]}) for o, value in zip(FEW[:2], (0.2, 0.6), strict=True)]
    rows = drawn(
        plots.learning_curves([*runs, replace(FEW[2], curves={"success": [0.1, 0.2, 0.3]})], "success", "t", "share"),
        tmp_path,
        monkeypatch,
    )
    assert [(r["series"], r["x"]) for r in rows[:2]] == [("mine (2 runs)", "1"), ("mine (2 runs)", "3")]
    assert [float(rows[0][k]) for k in ("y", "low", "high")] == pytest.approx([0.4, 0.2, 0.6])  # sd .2828 / √2
    assert [r["low"] for r in rows[2:]] == ["", "", ""]  # of a single run nothing is known


def test_comparison_figures_hold_the_summary(tmp_path, monkeypatch):
    rows = summary(FEW)
    figures = comparison_figures(FEW, rows)
    assert list(figures) == ["differences", "kinds", "success"]
    (line,) = drawn(figures["differences"], tmp_path, monkeypatch)
    assert line["y"] == "mine (3)"
    assert [float(line[k]) for k in ("x", "low", "high")] == pytest.approx(
        [100 * rows[1][k] for k in ("difference", "difference_low", "difference_high")]
    )
    bars = drawn(figures["kinds"], tmp_path, monkeypatch)
    assert {(b["series"], b["x"]): float(b["y"]) for b in bars}["grpo", "pick"] == 75.0


def test_sensitivity_and_data_efficiency_have_a_line_a_setting(tmp_path, monkeypatch):
    row = summary(FEW)[1]
    lines = drawn(
        sensitivity([row | {"coef": c, "beta": b} for b in (5.0, 1.0) for c in (0.1, 0.01)], "t"),
        tmp_path,
        monkeypatch,
    )
    assert [(x["series"], x["x"]) for x in lines] == [(f"β = {b}", c) for b in (1, 5) for c in ("0.01", "0.1")]
    assert float(lines[0]["y"]) == pytest.approx(100 * row["success"]) and float(lines[0]["low"]) == pytest.approx(
        100 * row["low"]
    )
    lines = drawn(data_efficiency([row | {"train_tasks": n} for n in (384, 24)], "t"), tmp_path, monkeypatch)
    assert [(x["series"], x["x"]) for x in lines] == [("mine", "24"), ("mine", "384")]


def test_a_figure_is_drawn_by_the_real_browser(tmp_path):
    figure = comparison_figures(FEW, summary(FEW))["differences"]
    table, svg, pdf = save_figure(figure, tmp_path / "deep" / "differences")
    assert table.exists() and pdf.read_bytes().startswith(b"%PDF")
    assert "mine (3)" in "".join(ET.fromstring(svg.read_text()).itertext())


def test_without_a_browser_the_csv_is_there_and_the_error_says_what_is_missing(tmp_path, monkeypatch):
    def nothing(self, format):
        raise RuntimeError("Kaleido requires Google Chrome")

    figure = comparison_figures(FEW, summary(FEW))["differences"]
    monkeypatch.setattr(type(figure), "to_image", nothing)
    with pytest.raises(PlotError, match=r"differences.csv is written, but SVG and PDF need Chromium"):
        save_figure(figure, tmp_path / "differences")
    assert [p.name for p in tmp_path.iterdir()] == ["differences.csv"]
