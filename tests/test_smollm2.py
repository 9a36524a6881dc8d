"""SmolLM2 itself: what tests with small random chat models cannot show. By hand, with -m slow; needs PyPI once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from seedkit.envs import make, spread
from seedkit.policy import load_policy
from seedkit.rollout import collect

pytestmark = pytest.mark.slow
NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def env():
    return make("household")


@pytest.mark.parametrize("window", [None, 2], ids=["transcript", "window"])
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "LoRA"])
def test_the_rollout_has_the_log_probs_of_the_scorer(env, window, lora):
    """16 episodes at once and one at a time, float32."""
    policy = load_policy(NAME, window=window)
    if lora:
        policy.add_lora(NAME, rank=8)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in policy.own().values():
                parameter.add_(0.02 * torch.randn_like(parameter))
    tasks = spread(env.panel("valid_seen"), 16)
    played = collect(policy, env, tasks, max_steps=3, max_new_tokens=8)
    alone = collect(policy, env, tasks[:3], max_steps=3, max_new_tokens=8, batch_size=1)
    assert [t.response_ids for t in alone] == [t.response_ids for t in played[:3]]
    for trajectories in (played, alone):
        counts = [len(policy.samples(t)) for t in trajectories]
        assert set(counts) == {1 if window is None else 3}
        scored = policy.token_logprobs([s for t in trajectories for s in policy.samples(t)])
        rolled = torch.tensor([p for t in trajectories for p in t.behaviour_logp])
        assert len(rolled) > 3 * 3 * len(trajectories)
        assert (torch.cat(scored) - rolled).abs().max() < 1e-3


UPDATE = """
import json, re
from pathlib import Path
from seedkit.envs import make, spread
from seedkit.policy import load_policy
from seedkit.train import Stage2Config, stage2
policy, env = load_policy("smollm2-135m"), make("household")
policy.add_lora("smollm2-135m", rank=16)
tasks, lengths = spread(env.panel("train"), 2), []
keep = lambda row, trajectories, shifts: lengths.extend(len(policy.lay_out(t).ids) for t in trajectories)
config = Stage2Config(method="sdar", updates=1, tasks=2, group=4, max_steps=20, max_new_tokens=40)
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 2**20
before = peak()
stage2(policy, env, tasks, config, on_update=keep)
print(json.dumps({"lengths": lengths, "GiB": peak(), "before": before}))
"""


def test_an_update_with_lora_stays_in_four_gib():
    """8 trajectories of about 1,000 tokens; `SDAR`, whose skills need no analysis.

    All of the process is counted, but not what its parent held when it forked, which ru_maxrss counts too.
    """
    done = subprocess.run([sys.executable, "-c", UPDATE], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert len(found["lengths"]) == 8 and sum(found["lengths"]) >= 8 * 950, found
    assert found["GiB"] <= 4, found


def test_a_page_of_recorded_episodes(tmp_path):
    """With the model in the cache; the first time, with the download, is measured by hand."""
    page = tmp_path / "page.html"
    skill = tmp_path / "skill.txt"
    skill.write_text("First take it, then go to the microwave and heat it.", encoding="utf-8")
    episodes = "data/trajectories/household-right.jsonl"
    command = [sys.executable, "-m", "seedkit.cli", "inspect", episodes, "--model", NAME, "--trajectory", "1"]
    subprocess.run([*command, "--skill", str(skill), "-o", str(page)], check=True)
    assert re.search("microwave", page.read_text(encoding="utf-8"))


def test_the_notebook_runs_in_five_minutes():
    """On two free cores, the model in the cache. Too long for `make test`, which leaves this notebook out."""
    path = Path(__file__).resolve().parents[1] / "notebooks" / "11_real_model.ipynb"
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    seconds = time.perf_counter() - begin
    print(f"{seconds:.0f} s")
    assert seconds <= 300
