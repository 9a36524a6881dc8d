"""Gap, gate, weight and loss in the browser equal `seedkit.methods`, to 1e-6."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from seedkit.widgets.inspector import SHOWN, method_spec  # pyright: ignore[reportMissingImports]

SPEC = importlib.util.spec_from_file_location("golden", Path(__file__).parents[1] / "golden" / "make.py")
assert SPEC and SPEC.loader
golden = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(golden)

NUMBERS = """([method, beta, coef, columns]) => {
  const each = (object, f) => Object.fromEntries(Object.entries(object).map(([k, v]) => [k, f(v)]));
  const floats = each(columns, (v) => Float32Array.from(v, (x) => x ?? NaN));
  const out = window.seed.numbers(method, beta, coef, floats);
  return each(out, (v) => Array.from(v, (x) => (Number.isFinite(x) ? x : null)));
}"""


def nones(values):
    """A list for JavaScript, which has no NaN in JSON."""
    return [float(x) if math.isfinite(x) else None for x in values]


def close(found, wanted):
    found, wanted = np.array(found, float), np.asarray(wanted, float)
    assert (np.isnan(found) == np.isnan(wanted)).all()
    known = ~np.isnan(wanted)
    return np.allclose(found[known], wanted[known], rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def recorded():
    return pd.read_parquet(golden.FILE)


def test_the_golden_file_is_what_python_computes(recorded):
    fresh = golden.frame()
    assert list(fresh.columns) == list(recorded.columns), "run python tests/golden/make.py"
    for name in fresh:
        assert close(recorded[name], fresh[name]), f"{name}: run python tests/golden/make.py"


def test_every_method_agrees_on_a_thousand_tokens(module_page, recorded):
    given = {name: nones(recorded[name]) for name in golden.inputs()}
    checked = 0
    for method in SHOWN.values():
        for beta, coef in golden.SETTINGS:
            weight = method.coef if coef is None else coef
            found = module_page.evaluate(NUMBERS, [method_spec(method), beta, weight, given])
            assert close(found["delta"], recorded["delta"]) and close(found["gate"], recorded[f"gate {beta}"])
            for name in ("weight", "loss"):
                assert close(found[name], recorded[f"{name} {method.name} {beta} {coef}"]), (method.name, name)
            checked += len(found["weight"])
    assert checked == 1000 * len(SHOWN) * len(golden.SETTINGS)
