"""A causal language model with its tokenizer and prompt layout: sampling and scoring, token in, token out.

Implements: incremental rendering of a multi-turn episode (`context="transcript"`), batched sampling with one KV
cache that lives across turns, and float32 log-probabilities at response positions only. Leaves out for now: chat
templates of other model families, the papers' windowed prompt, LoRA.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from seedkit.envs.base import data_dir
from seedkit.types import Skill, Trajectory

transformers_logging.disable_progress_bar()  # a bar for every checkpoint of a megabyte says nothing


class PolicyError(ValueError):
    """A checkpoint or context that cannot be used; the message says what would be right."""


class ContextOverflow(PolicyError):
    """A context longer than the model can read."""


@dataclass(frozen=True)
class Layout:
    """How an episode is written for the model. Every field is text that the tokenizer turns into tokens.

    A turn is `user + observation [+ skill + advice] + assistant`, then the sampled response, which ends with
    `end`. An episode skill stands right after the task description, which closes the first observation; a step
    skill right before the request to act. The analysis is asked for at the end: `user + last observation +
    analyze + outcome + assistant`.
    """

    begin: str
    user: str
    assistant: str
    end: str
    skill: str
    analyze: str


@dataclass(frozen=True)
class Sample:
    """A token sequence to score: `mask[i]` is True where `ids[i]` was sampled by a policy."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


class Policy:
    """A model, its tokenizer and its layout. `version` is a hash of the weights."""

    def __init__(self, model: Any, tokenizer: Any, layout: Layout, name: str = "policy") -> None:
        self.model, self.tokenizer, self.layout, self.name = model, tokenizer, layout, name
        self.end_id = tokenizer.convert_tokens_to_ids(layout.end)
        self.pad_id = tokenizer.pad_token_id
        self._ids = functools.lru_cache(maxsize=50_000)(self._encode)  # observations come again and again
        self.max_length: int = model.config.max_position_embeddings
        model.eval()

    @property
    def version(self) -> str:
        """Hash of the weights: two checkpoints that hold the same numbers share it."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            sha.update(name.encode())
            sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()[:12]

    def clone(self) -> Policy:
        """A frozen copy of the current weights."""
        model = copy.deepcopy(self.model)
        model.requires_grad_(False)
        return Policy(model, self.tokenizer, self.layout, self.name)

    def save(self, path: Path) -> None:
        """Write weights (safetensors), tokenizer and layout to a folder that `load_policy` reads."""
        path.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        (path / "layout.json").write_text(json.dumps(asdict(self.layout), indent=1), encoding="utf-8")

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
        lay = self.layout
        head = self._markers(lay.begin + lay.user) + self.encode(observation)
        return head + self._advice(skill.episode if skill else "") + self._request(0, skill)

    def turn_ids(self, observation: str, turn: int, skill: Skill | None = None) -> list[int]:
        """Tokens between one response and the next."""
        return self._markers(self.layout.user) + self.encode(observation) + self._request(turn, skill)

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
        plain = self.lay_out(trajectory, Skill() if trajectory.skill else None)
        return list(plain.ids) + tail + self.encode(outcome) + self._markers(lay.assistant)

    def _advice(self, text: str) -> list[int]:
        return self._markers(self.layout.skill) + self.encode(text) if text.strip() else []

    def _request(self, turn: int, skill: Skill | None) -> list[int]:
        return self._advice(skill.steps.get(turn, "") if skill else "") + self._markers(self.layout.assistant)

    def lay_out(self, trajectory: Trajectory, skill: Skill | None = None) -> Sample:
        """The whole episode as one sample; with a skill, the same responses under the advised contexts.

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
        plain = bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())  # pads, if any, on the right
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        hidden = self.model.base_model(
            input_ids=ids,
            attention_mask=None if plain else attention_mask.long(),
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        logits = self.model.get_output_embeddings()(hidden[:, :-1][response_mask[:, 1:]])
        return torch.log_softmax(logits.float() / temperature, dim=-1)

    def logprobs(
        self,
        ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        response_mask: Bool[Tensor, "B T"],
        *,
        temperature: float = 1.0,
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """`sampled` of `next_logp`: each response token's log-probability, and the entropy it was drawn with."""
        return sampled(
            self.next_logp(ids, attention_mask, response_mask, temperature=temperature), ids, response_mask
        )

    def batches(self, samples: Sequence[Sample], token_budget: int = 8192) -> list[list[int]]:
        """Indices of samples packed by length, so that no padded batch exceeds the token budget."""
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
        self, samples: Sequence[Sample], *, temperature: float = 1.0, token_budget: int = 8192
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
            logp, _ = self.logprobs(*self.pad(chosen), temperature=temperature)
            for i, part in zip(pack, logp.split([sum(s.mask) for s in chosen]), strict=True):
                out[i] = part
        return out

    def distributions(self, sample: Sample, temperature: float = 1.0, positions: int = 256) -> Iterator[Tensor]:
        """Log-probabilities [N, V] (nats, float32) of all tokens at a sample's response positions, N at a time."""
        ids, _, response = self.pad([sample])
        with torch.no_grad():
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            parts = hidden[response[:, 1:]].split(positions)
        for part in parts:
            with torch.no_grad():
                logits = self.model.get_output_embeddings()(part).float()
            yield torch.log_softmax(logits / temperature, dim=-1)

    # --- sampling --------------------------------------------------------------------------------------------------

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
            answers, _ = Conversation(self, len(part)).say(part, rngs, max_new_tokens, temperature)
            out += answers
        return out


def sampled(
    next_logp: Float[Tensor, "N V"], ids: Int[Tensor, "B T"], response_mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probabilities of the sampled tokens, and the entropies (nats, detached) of their distributions."""
    with torch.no_grad():
        entropy = -(next_logp.exp() * next_logp).sum(-1)
    return next_logp.gather(-1, ids[:, 1:][response_mask[:, 1:]].unsqueeze(-1)).squeeze(-1), entropy


class _RoomyLayer(DynamicLayer):
    """A layer of the KV cache with room behind its tokens: a new one is written there and moves none of the old."""

    room: Tensor | None = None  # keys and values, [2, B, heads, tokens and more, head width]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, new tokens, head width]; return all of them."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        room = self.room
        if room is None or end > room.shape[-2]:
            rows, heads, _, width = key_states.shape
            room = key_states.new_empty(2, rows, heads, end + end // 2, width)
            if self.room is not None:
                room[..., :begin, :] = self.room[..., :begin, :]
            self.room, self.is_initialized = room, True
        room[0, :, :, begin:end], room[1, :, :, begin:end] = key_states, value_states
        self.keys, self.values = room[..., :end, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows with these numbers."""
        if self.room is not None:
            self.room = self.room[:, indices]
            self.keys, self.values = self.room[..., : self.get_seq_length(), :]


class Conversation:
    """Batched multi-turn sampling over one KV cache: rows get new context, then answer, turn after turn."""

    def __init__(self, policy: Policy, rows: int) -> None:
        self.policy = policy
        self.cache = DynamicCache(config=policy.model.config)
        self.cache.layers = [_RoomyLayer() if type(at) is DynamicLayer else at for at in self.cache.layers]
        self.attention = torch.zeros(rows, 0, dtype=torch.long)
        self.pending: list[list[int]] = [[] for _ in range(rows)]

    @torch.no_grad()
    def _read(self, blocks: Sequence[Sequence[int]]) -> Tensor:
        """Append one block of tokens a row (padded on the left); return next-token logits [B, V] in float32."""
        width = max(len(b) for b in blocks)
        ids = torch.tensor([[self.policy.pad_id] * (width - len(b)) + list(b) for b in blocks])
        real = torch.tensor([[0] * (width - len(b)) + [1] * len(b) for b in blocks])
        self.attention = torch.cat([self.attention, real], dim=1)
        positions = (self.attention.cumsum(-1) - 1).clamp(min=0)[:, -width:]
        out = self.policy.model(
            input_ids=ids,
            attention_mask=self.attention,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1].float()

    def say(
        self,
        contexts: Sequence[Sequence[int]],
        rngs: Sequence[np.random.Generator],
        max_new_tokens: int,
        temperature: float,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Give every row its context and sample its answer.

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
                if token == self.policy.end_id or len(answers[r]) >= max_new_tokens:
                    self.pending[r] = [token]
                    open_rows.discard(r)
                else:
                    blocks[r] = [token]
        return answers, logps

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row but the given ones."""
        index = torch.tensor(list(rows))
        self.cache.batch_select_indices(index)
        self.attention = self.attention[index]
        self.pending = [self.pending[r] for r in rows]


def load_policy(name: str | Path) -> Policy:
    """Load a policy by the name of a committed one (`household-tiny`) or from a folder that `Policy.save` wrote.

    Raises:
        PolicyError: naming the folder and what is missing in it.
    """
    path = Path(name)
    if not path.is_dir():
        path = data_dir() / "policies" / str(name)
    if not path.is_dir():
        known = sorted(p.name for p in (data_dir() / "policies").glob("*/"))
        raise PolicyError(
            f"no policy {str(name)!r}: give a folder or one of {', '.join(known) or '(none built yet)'}"
        )
    for file, what in (
        ("config.json", "model configuration"),
        ("layout.json", "prompt layout"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer settings"),
        ("model.safetensors", "other weight formats are not loaded"),
    ):
        if not (path / file).exists():
            raise PolicyError(f"{path}: {file} is missing ({what})")
    try:
        fields = json.loads((path / "layout.json").read_text(encoding="utf-8"))
        for field, value in fields.items():
            if not isinstance(value, str):
                raise ValueError(f"layout field {field!r} must be text, got {value!r}")
        layout = Layout(**fields)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
        model, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
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
    return Policy(model, tokenizer, layout, Path(name).name)
