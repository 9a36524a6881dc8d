"""`seedkit doctor`: versions, cores, memory, GPU and data; what is missing and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from seedkit.envs import NAMES, make
from seedkit.envs.base import data_dir

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "alfworld",
    "textworld",
    "bm25s",
    "jupyterlab",
    "ipywidgets",
    "plotly",
)


def report() -> str:
    """One line a thing: name, what is there, and for what is missing the command that fetches it."""
    lines = [("python", platform.python_version()), ("cores", str(os.cpu_count())), ("memory", _memory())]
    lines += [(name, _version(name)) for name in PACKAGES]
    lines += [
        ("GPU", _gpu()),
        ("build tools", _tools()),
        ("fast engine", _engine()),
        *((f"{name} panels", _try(lambda name=name: _panels(name))) for name in NAMES),
        ("household-tiny", _try(_policy)),
        ("official ALFWorld games", _try(_official)),
        ("Chromium", _browser()),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _try(find: Callable[[], str]) -> str:
    try:
        return find()
    except (ValueError, OSError) as error:
        return f"missing; {error}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        extra = {"jupyterlab": "[notebook]", "ipywidgets": "[notebook]", "bm25s": "[search]"}.get(name, "")
        return f"missing; pip install -c constraints.txt -e .{extra}"


def _memory() -> str:
    pages = Path("/proc/meminfo")
    if not pages.exists():
        return "unknown"
    fields = dict(line.split(":", 1) for line in pages.read_text().splitlines() if ":" in line)
    free, total = (int(fields[name].split()[0]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    return f"{free:.1f} GiB free of {total:.1f}"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none (nothing here needs one)"


def _tools() -> str:
    missing = [t for t in ("gcc", "g++", "make", "cmake") if not shutil.which(t)]
    return "ok" if not missing else f"missing {', '.join(missing)}; Debian: apt-get install build-essential cmake"


def _browser() -> str:
    path = Path("/usr/bin/chromium")
    found = str(path) if path.exists() else "missing; Debian: apt-get install chromium fonts-noto-cjk"
    return f"{found} (only the browser tests use it)"


def _engine() -> str:
    import textworld

    from seedkit.envs.household_engine import CHECKED_VERSIONS

    checked = textworld.__version__ in CHECKED_VERSIONS
    return "on" if checked else f"off: checked with textworld {', '.join(CHECKED_VERSIONS)}; the stock engine is used"


def _panels(name: str) -> str:
    env = make(name)
    return ", ".join(f"{split} {len(env.panel(split))}" for split in ("train", "valid_seen", "valid_unseen"))


def _policy() -> str:
    from seedkit.policy import load_policy

    return f"{load_policy('household-tiny').version} in {data_dir() / 'policies'}"


def _official() -> str:
    from seedkit.envs.household import official_root

    return str(official_root())
