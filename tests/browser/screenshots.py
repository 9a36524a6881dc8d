"""Take README's pictures of the inspector in JupyterLab: `python tests/browser/screenshots.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from conftest import QUIET, ROOT, Tab, running_lab
from playwright.sync_api import sync_playwright

CODE = f"""from seedkit.policy import load_policy
from seedkit.rescoring import contrast
from seedkit.widgets import SkillInspector
folder = {str(ROOT)!r} + "/data/trajectories/household-"
policy = load_policy("household-tiny")
files = {{name: f"{{folder}}{{name}}.jsonl" for name in ("right", "wrong")}}
recorded = SkillInspector.read(files, policy=policy).signals
others = {{name: contrast(policy, recorded.trajectories, skills) for name, skills in recorded.skills.items()}}
given = {{"skills": recorded.skills, "contrasts": others, "policy": policy, "height": 350}}"""
SHOW = """view = SkillInspector(recorded.trajectories, recorded.shifts, **given)
view.trajectory = 2
view.token = int(view.frame()["delta"].abs().idxmax())
view"""


def main() -> None:
    """One picture a theme, of the view alone."""
    with (
        tempfile.TemporaryDirectory() as home,
        sync_playwright() as playwright,
        running_lab(Path(home) / "lab") as lab,
    ):
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=QUIET)
        for theme in ("Light", "Dark"):
            name = f"{theme}.ipynb"
            lab.notebook(name, [CODE, SHOW])
            page = lab.open(Tab(browser.new_page(viewport={"width": 1280, "height": 1000})), name)
            page.evaluate(
                "t => window.jupyterapp.commands.execute('apputils:change-theme', { theme: t })",
                f"JupyterLab {theme}",
            )
            lab.execute(page, "application:toggle-left-area")
            lab.run_all(page)
            root = page.locator(".sk[data-ready]")
            root.wait_for()
            root.scroll_into_view_if_needed()
            page.wait_for_timeout(1000)
            path = ROOT / "data" / "screenshots" / f"inspector-{theme.lower()}.png"
            root.screenshot(path=path)
            print(path.name, path.stat().st_size)
        browser.close()


if __name__ == "__main__":
    main()
