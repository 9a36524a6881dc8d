"""Write inspector.parquet: what `seedkit.methods` makes of a thousand tokens, for the browser to be held to.

Run `python tests/golden/make.py` when a method or a formula changes, and look at the difference.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from seedkit.widgets.inspector import SHOWN  # pyright: ignore[reportMissingImports]
from seedkit.widgets.signals import token_numbers  # pyright: ignore[reportMissingImports]

FILE = Path(__file__).parent / "inspector.parquet"
SETTINGS = ((5.0, None), (1.5, 0.7))
"""β and λ; None is the method's own λ."""
TOKENS = 1000


def inputs() -> dict[str, np.ndarray]:
    """Random tokens, with extremes: Δ of ±60 nats, Δ = 0, ratios far off 1, A = 0, unsupervised, NaN teacher."""
    rng = np.random.default_rng(5)
    student = -rng.exponential(1.5, TOKENS)
    columns = {
        "student": student,
        "teacher": np.minimum(student + rng.normal(0, 1.5, TOKENS), 0),
        "behaviour": student + rng.normal(0, 0.3, TOKENS) * (rng.random(TOKENS) < 0.5),
        "advantage": rng.normal(0, 1, TOKENS),
        "taught": (rng.random(TOKENS) < 0.9).astype(float),
    }
    extremes = [  # student, teacher, behaviour, advantage, taught
        (-0.01, -60.0, -0.01, 1.0, 1), (-40.0, -0.01, -40.0, 1.0, 1), (-1.0, -1.0, -1.0, 1.0, 1),
        (-1.0, -1.0, -1.0, -1.0, 1), (-2.0, -1.0, -6.0, 1.0, 1), (-6.0, -1.0, -2.0, -1.0, 1),
        (-1.0, np.nan, -1.0, 1.0, 1), (-1.0, -2.0, -1.0, 0.0, 1), (-1.0, -0.5, -1.0, 2.47, 0),
        (0.0, 0.0, 0.0, 0.0, 1), (-30.0, -0.001, -30.0, -2.0, 1), (-1e-7, -1e-7, -1e-7, 0.3, 1),
    ]  # fmt: skip
    for name, values in zip(columns, zip(*extremes, strict=True), strict=True):
        columns[name][: len(values)] = values
    return {name: values.astype(np.float32) for name, values in columns.items()}


def frame() -> pd.DataFrame:
    """Inputs; Δ; the gate at each β; weight and loss of every method at each setting."""
    columns = given = inputs()
    for beta, coef in SETTINGS:
        for method in SHOWN.values():
            values = token_numbers(method, **given, beta=beta, coef=method.coef if coef is None else coef)
            columns = columns | {"delta": values["delta"], f"gate {beta}": values["gate"]}
            columns |= {f"{name} {method.name} {beta} {coef}": values[name] for name in ("weight", "loss")}
    return pd.DataFrame(columns)


if __name__ == "__main__":
    frame().to_parquet(FILE, compression="zstd")
    print(FILE.name, FILE.stat().st_size)
