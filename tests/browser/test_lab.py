"""The inspector in a real JupyterLab: live, in the dark, twice in a notebook, and saved without a kernel."""

from __future__ import annotations

import json

import pytest
from conftest import RECORDED, ROOT

START = f"""import sys
from seedkit.widgets import GateExplorer, SkillEditor, SkillInspector
files = {{name: {str(ROOT)!r} + f"/data/trajectories/household-{{name}}.jsonl" for name in ("right", "wrong")}}
view = SkillInspector.read(files, height=260)
view"""


def said(page, lab, code):
    """What Python prints for some code, run in a fresh last cell."""
    page.evaluate(
        """async (code) => {
          const panel = window.jupyterapp.shell.currentWidget;
          const reply = panel.sessionContext.session.kernel.requestExecute({ code });
          window.said = '';
          reply.onIOPub = (m) => { if (m.header.msg_type === 'stream') window.said += m.content.text;
            if (m.header.msg_type === 'error') window.said += m.content.evalue; };
          await Promise.race([reply.done, new Promise((r) => setTimeout(r, 20000))]);
        }""",
        code,
    )
    return page.evaluate("window.said").strip()


def eventually(page, wanted, check, seconds=10):
    """Ask until the answer is the wanted one."""
    for _ in range(seconds * 10):
        if (found := check()) == wanted:
            return
        page.wait_for_timeout(100)
    assert found == wanted


def ready(page, nth=0):
    root = page.locator(".sk[data-ready]").nth(nth)
    root.wait_for(timeout=60_000)
    root.scroll_into_view_if_needed()
    return root


def test_live_view_and_python_are_one(lab, open_tab):
    lab.notebook("live.ipynb", [START])
    tab = open_tab(1280, 800)
    page = lab.open(tab, "live.ipynb")
    lab.run_all(page)
    root = ready(page)
    # from the view to Python, by mouse
    root.locator(".sk-block span:not(.o)").nth(3).click()
    eventually(page, "3", lambda: said(page, lab, "print(view.token)"))
    root.get_by_label("method", exact=True).select_option("centred")
    root.get_by_label("β, exact").fill("2")
    root.get_by_label("β, exact").press("Enter")
    root.get_by_label("skill", exact=True).select_option("wrong")
    root.get_by_label("colour", exact=True).select_option("weight")
    eventually(
        page,
        "centred 2.0 wrong weight",
        lambda: said(page, lab, "print(view.method, view.beta, view.skill, view.channel)"),
    )
    wanted = json.loads(said(page, lab, "print(view.frame().iloc[3][['delta', 'gate', 'weight', 'loss']].to_json())"))
    for name, key in (("shift Δ", "delta"), ("gate", "gate"), ("weight", "weight"), ("loss", "loss")):
        shown = root.locator(f".sk-card [data-value='{name}']").inner_text().replace("−", "-")
        assert abs(float(shown) - wanted[key]) <= 1e-6
    root.locator(".sk-chart").first.locator("rect", has_text="verb, turn 1:").click()
    eventually(page, "[0]", lambda: said(page, lab, "print(view.selection)"))
    # by keyboard: JupyterLab must not take the keys (b would insert a cell, d d delete one)
    cells = page.locator(".jp-Cell").count()
    root.locator(".sk-text").focus()
    for key in ("b", "a", "d", "d", "ArrowRight", "n", "t", "t"):
        page.keyboard.press(key)
    assert page.locator(".jp-Cell").count() == cells
    # from Python to the view
    said(page, lab, "view.token = 7; view.beta = 0.5; view.trajectory = 2")
    eventually(page, "0.5", lambda: root.get_by_label("β, exact").input_value())
    eventually(page, "2", lambda: root.get_by_label("trajectory", exact=True).input_value())
    assert said(page, lab, "view.method = 'nonsense'").startswith("unknown method 'nonsense'")
    # a callback on a selection
    said(page, lab, "seen = []; view.observe(lambda c: seen.append(c['new']), 'token')")
    root.locator(".sk-block span:not(.o)").nth(1).click()
    eventually(page, "[1]", lambda: said(page, lab, "print(seen)"))


def test_two_views_in_one_notebook_do_not_meddle(lab, open_tab):
    lab.notebook("two.ipynb", [START, "other = SkillInspector.read(files, height=260, method='grpo')\nother"])
    page = lab.open(open_tab(1280, 1400), "two.ipynb")
    lab.run_all(page)
    first, second = ready(page, 0), ready(page, 1)
    second.get_by_label("β, exact").fill("3")
    second.get_by_label("β, exact").press("Enter")
    first.locator(".sk-block span:not(.o)").nth(2).click()
    second.locator(".sk-block span:not(.o)").nth(4).click()
    first.get_by_label("search the text").fill("the")
    eventually(page, "2 4 5.0 3.0", lambda: said(page, lab, "print(view.token, other.token, view.beta, other.beta)"))
    assert second.locator(".sk-found").inner_text() == ""
    assert first.get_by_label("method", exact=True).input_value() == "seed"
    assert second.get_by_label("method", exact=True).input_value() == "grpo"


def test_saved_and_reopened_without_a_kernel_the_summary_shows(lab, open_tab):
    path = lab.notebook("saved.ipynb", [START, "view.freeze()"])
    tab = open_tab(1280, 800)
    page = lab.open(tab, "saved.ipynb")
    before = path.stat().st_size
    lab.run_all(page)
    page.locator("text=largest |Δ|").first.wait_for()
    assert page.locator(".sk").count() == 0  # replaced where it stood
    lab.execute(page, "docmanager:save")
    page.wait_for_timeout(1500)
    assert "largest |Δ|" in path.read_text()
    assert path.stat().st_size - before <= 20_000
    page.evaluate("window.jupyterapp.serviceManager.sessions.shutdownAll()")
    again = open_tab(1280, 800)
    page = lab.open(again, "saved.ipynb")
    page.locator("text=largest |Δ|").first.wait_for(timeout=30_000)


def test_an_unfrozen_view_leaves_the_summary_where_no_kernel_runs(lab, open_tab):
    path = lab.notebook("grown.ipynb", [START])
    page = lab.open(open_tab(1280, 800), "grown.ipynb")
    before = path.stat().st_size
    lab.run_all(page)
    ready(page)
    eventually(page, False, lambda: page.locator("text=largest |Δ|").first.is_visible())  # the live view hides it
    lab.execute(page, "docmanager:save")
    page.wait_for_timeout(1500)
    saved = json.loads(path.read_text())
    texts = ["".join(o["data"].get("text/html", "")) for o in saved["cells"][0]["outputs"] if "data" in o]
    assert sum("largest |Δ|" in text for text in texts) == 1 and "<script" not in "".join(texts)
    assert path.stat().st_size - before <= 20_000
    assert "state" not in json.dumps(saved["metadata"])
    page.evaluate("window.jupyterapp.serviceManager.sessions.shutdownAll()")
    page = lab.open(open_tab(1280, 800), "grown.ipynb")
    page.locator("text=largest |Δ|").first.wait_for(timeout=30_000)


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_the_view_follows_jupyterlabs_theme(lab, open_tab, theme):
    lab.notebook("theme.ipynb", [START])
    page = lab.open(open_tab(900, 700), "theme.ipynb")
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme)
    lab.run_all(page)
    root = ready(page)
    eventually(page, True, lambda: _dark(root) == ("Dark" in theme))
    root.locator(".sk-block span:not(.o)").nth(3).click()
    background = root.evaluate("e => getComputedStyle(e).backgroundColor")
    words = root.locator(".sk-block span:not(.o)").nth(3).evaluate("e => getComputedStyle(e).color")
    assert (_light(background) > 128) != (_light(words) > 128)


def _light(colour):
    return sum(map(float, colour.removeprefix("rgb(").removesuffix(")").split(",")[:3])) / 3


def _dark(root):
    return _light(root.evaluate("e => getComputedStyle(e).backgroundColor")) < 128


def test_gate_explorer_and_skill_editor(lab, open_tab):
    cells = [
        START,
        "gate = GateExplorer(view.signals.trajectories[0], view.signals.shifts['right'][0]).link(view)\ngate",
        "from seedkit.policy import load_policy\n"
        "some, skill = view.signals.trajectories[:2], view.signals.skills['right'][0]\n"
        "editor = SkillEditor(load_policy('household-tiny'), some, skill)\n"
        "editor",
    ]
    lab.notebook("more.ipynb", cells)
    page = lab.open(open_tab(1280, 1400), "more.ipynb")
    lab.run_all(page)
    root = page.locator(".sk-gate[data-ready]")
    root.wait_for(timeout=60_000)
    root.get_by_label("β, exact").fill("2")
    root.get_by_label("β, exact").press("Enter")
    eventually(page, "2.0 2.0", lambda: said(page, lab, "print(gate.beta, view.beta)"))
    dot = root.locator("circle").nth(4)
    n = int(dot.get_attribute("data-token"))
    wanted = float(said(page, lab, f"print(view.frame()['gate'][{n}])"))
    assert abs(float(dot.get_attribute("data-gate")) - wanted) <= 1e-6
    root.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    eventually(page, True, lambda: said(page, lab, "print(view.token == gate.token >= 0)") == "True")
    page.locator(".widget-textarea textarea").fill("find it, take it, then wait and look around.")
    page.get_by_role("button", name="re-score").click()
    eventually(page, True, lambda: said(page, lab, "print(editor.message.value)") == "done")
    moved = said(page, lab, "print(editor.shifts['after'][0].delta != editor.shifts['before'][0].delta)")
    assert moved == "True"
    page.get_by_role("button", name="re-score").scroll_into_view_if_needed()
    last = page.locator(".sk[data-ready]").last
    assert last.get_by_label("less", exact=True).input_value() == "before"
    assert said(page, lab, "editor.cancel(); print(editor._cancelled.is_set())") == "True"
    assert RECORDED["right"].exists()
