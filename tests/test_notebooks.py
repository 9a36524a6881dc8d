"""Notebooks keep their form: small cells, a first cell that says what to expect, nothing that can stall a run."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

PATHS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=PATHS, ids=lambda path: path.name)
def notebook(request):
    return json.loads(request.param.read_text(encoding="utf-8"))


def test_the_first_cell_names_claim_and_run_time(notebook):
    first = notebook["cells"][0]
    assert first["cell_type"] == "markdown"
    for part in (r"^# \S", r"\*\*Claims? shown\*\* \(\d.* in `PAPERS\.md`[^)]*\)", r"\*\*Run time:\*\* about \d+ s"):
        assert re.search(part, "".join(first["source"]), re.MULTILINE), part


def test_cells_are_small(notebook):
    assert [cell["id"] for cell in notebook["cells"] if len("".join(cell["source"]).splitlines()) > 25] == []


def test_runs_on_any_python_kernel(notebook):
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


def test_no_control_draws_before_it_is_used(notebook):
    # Output inside an Output widget while a cell runs makes nbclient answer it on the socket that it polls, and it
    # may then wait for its whole timeout; `interact_manual` draws at the press of its button.
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [source for source in sources if re.search(r"\b(interact|interactive|interactive_output)\(", source)] == []


def test_what_is_imported_is_there(notebook):
    """Also in a notebook that is too long to be run with the others."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith(("%", "!"))]
            for node in ast.walk(ast.parse("\n".join(lines))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("seedkit"):
                    module = importlib.import_module(node.module or "")
                    assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module
