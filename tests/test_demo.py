"""The demo, small: every step of it, its table and its report."""

from __future__ import annotations

import html.parser
import json
import re

import pytest

from seedkit.demo import demo
from seedkit.train import RunError, Stage1Config


class Loads(html.parser.HTMLParser):
    """Collects whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("#", "data:"))]


def test_the_demo_goes_from_stage1_to_a_table_and_a_report(tmp_path, capsys):
    rows = demo(tmp_path / "demo", updates=1, panel=6, episodes=1, taught=6)
    assert [r.name for r in rows] == ["base", "base + skill in prompt", "grpo", "seed"]
    assert rows[0].difference is None and all(r.difference is not None for r in rows[1:])
    assert all(0 <= r.success.low <= r.success.mean <= r.success.high <= 1 for r in rows)
    out = capsys.readouterr().out
    assert re.search(r"analyzer names the right workflow: \d+% before, \d+% after", out)
    assert re.search(r"^seed +[\d.]+ \[", out, re.MULTILINE)
    for name in ("grpo", "seed"):
        run = tmp_path / "demo" / "jobs" / name / "seed-0" / "run"
        protocol = json.loads((run / "protocol.json").read_text())
        assert protocol["config"]["method"] == name and protocol["config"]["updates"] == 1
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    loads = Loads()
    loads.feed(page)
    assert loads.found == []  # opens from disk without a network
    assert "plotly" in page.lower() and "skill tokens reached the teacher" in page


@pytest.mark.parametrize(("environment", "anchor"), [("household", 0.3), ("search", 3.0)])
def test_stage1_is_as_the_shipped_policy_was_taught(environment, anchor, tmp_path, monkeypatch):
    """`search-tiny` would unlearn ten points of play with household's anchor."""

    def teach(folder, env, policy, tasks, config, **_):
        assert config == Stage1Config(anchor=anchor, seed=3)
        raise RunError("seen")

    monkeypatch.setattr("seedkit.demo.teach", teach)
    with pytest.raises(RunError, match="seen"):
        demo(tmp_path / "demo", environment=environment, seed=3, panel=6, taught=6)
