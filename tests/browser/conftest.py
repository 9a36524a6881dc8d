"""Headless Chromium, a real JupyterLab on loopback, and signals to show in both."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
RECORDED = {name: ROOT / "data" / "trajectories" / f"household-{name}.jsonl" for name in ("right", "wrong", "absent")}
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium; without it these tests are skipped, but not where CI runs."""
    path = shutil.which("chromium")
    if path is None:
        words = "Chromium is missing; Debian: apt-get install chromium fonts-noto-cjk"
        pytest.fail(words) if os.environ.get("CI") else pytest.skip(words)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page that remembers what went wrong in it and what it asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.page.set_default_timeout(10_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._request)

    def _request(self, request):
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob", "file") and url.hostname != "127.0.0.1":
            self.elsewhere.append(request.url)


@pytest.fixture
def open_tab(browser: Browser):
    """A function that opens a tab; afterwards none of them may have met an error or left the machine."""
    tabs, contexts = [], []

    def opened(width=1100, height=900, **options) -> Tab:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
        tabs.append(Tab(contexts[-1].new_page()))
        return tabs[-1]

    yield opened
    for tab in tabs:
        assert tab.errors == []
        assert tab.elsewhere == []
    for context in contexts:
        context.close()


@pytest.fixture
def module_page(open_tab):
    """A blank page with the inspector's module as `window.seed`."""
    source = (ROOT / "widgets" / "static" / "inspector.js").read_bytes()
    tab = open_tab()
    address = "data:text/javascript;base64," + base64.b64encode(source).decode()
    tab.page.evaluate("async (address) => { window.seed = await import(address); }", address)
    return tab.page


def show(tab: Tab, view, tmp_path, name="page.html"):
    """Open a view's exported page from disk and return its root."""
    path = view.to_html(tmp_path / name)
    tab.page.goto(path.as_uri())
    root = tab.page.locator(".sk")
    root.and_(tab.page.locator("[data-ready]")).wait_for(timeout=20_000)
    return root


@dataclass
class Lab:
    """A running JupyterLab."""

    url: str
    token: str
    folder: Path

    def notebook(self, name: str, cells: list[str]) -> Path:
        """Write a notebook of code cells."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.folder / name
        nbformat.write(book, path)
        return path

    def open(self, tab: Tab, name: str) -> Page:
        """Open a notebook in a fresh workspace and wait until JupyterLab is ready."""
        tab.page.goto(f"{self.url}/lab/tree/{name}?reset&token={self.token}")
        tab.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        return tab.page

    def wait(self, page: Page) -> None:
        """Wait until the notebook's kernel is idle."""
        ready = """() => { const w = window.jupyterapp?.shell.currentWidget;
          const kernel = w?.sessionContext?.session?.kernel;
          return w?.context?.isReady && w.sessionContext.isReady && kernel?.status === 'idle'; }"""
        page.wait_for_function(ready, timeout=60_000)

    def run_all(self, page: Page) -> None:
        """Run all cells and wait until every one of them has its number."""
        self.wait(page)
        self.execute(page, "notebook:run-all-cells")
        count = page.locator(".jp-CodeCell").count()
        for n in range(count):
            prompt = page.locator(".jp-CodeCell .jp-InputPrompt").nth(n)
            deadline = time.monotonic() + 120
            while not re.fullmatch(r"\[\d+\]:", prompt.inner_text()):
                assert time.monotonic() < deadline, f"cell {n} is still {prompt.inner_text()!r}"
                page.wait_for_timeout(100)

    def execute(self, page: Page, name: str) -> None:
        """Run one of JupyterLab's commands."""
        page.evaluate("name => { window.jupyterapp.commands.execute(name); }", name)  # not waited for: some never end


@contextlib.contextmanager
def running_lab(home: Path):
    """JupyterLab on loopback with a token, its own settings, and no news."""
    folder, settings = home / "notebooks", home / "settings" / "@jupyterlab" / "apputils-extension"
    folder.mkdir(parents=True)
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTER_RUNTIME_DIR": str(home / "run"),
    }
    environment |= {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "IPYTHONDIR": str(home / "ipython"),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.collaborative=False"]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/api?token={token}", timeout=2).close()
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None, (home / "log").read_text()
                time.sleep(0.25)
        yield Lab(url, token, folder)
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The JupyterLab that all tests of a worker share."""
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab
