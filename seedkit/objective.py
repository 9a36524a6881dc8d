"""Reductions, group advantages, the clipped policy loss and the KL penalty.

Implements token and sequence means with a global denominator, GRPO's group-relative advantage, PPO's clipped
surrogate with separate lower and upper clip, and the low-variance KL to a reference policy.
Leaves out critics, dual clip, entropy bonuses, KL inside the reward and length-corrected advantages.

Losses come back per token, [B, T], to be minimised; `masked_mean` or `sequence_mean` reduces them. A mask is bool,
True = the token counts. Whatever stands at a masked position, NaN included, reaches neither value nor gradient.
"""

from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_NATS = 20.0
"""Log-ratios above this (a factor 4.9e8) are not exponentiated as they are; each use says what happens instead."""
EQUAL_REWARDS = 1e-6
"""A group whose largest and smallest reward differ by no more than this has equal rewards."""

Advantage = Float[Tensor, " B"] | Float[Tensor, "B T"]


def mask_inputs(mask: Tensor, **tensors: Tensor) -> list[Tensor]:
    """Check tensors against a mask and zero their masked positions, before any arithmetic.

    Returns:
        The tensors in the order given.
    Gradient: to every tensor, exactly 0 at masked positions.
    Raises:
        ValueError: a mask that is not bool, or a tensor whose shape is not the mask's.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool (True = the token counts), got {mask.dtype}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)} but the mask has {list(mask.shape)}")
    return [torch.where(mask, tensor, 0.0) for tensor in tensors.values()]


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], denominator: Tensor | float | int | None = None
) -> Float[Tensor, ""]:
    """Token mean, Σ m·x / denominator.

    Args:
        x: per-token values, any shape.
        mask: same shape, bool, True = counts.
        denominator: tokens of the *whole* batch when x is one micro-batch of it; the micro-batches' results then
            add up to the batch's mean. Default: the tokens of this mask.
    Returns:
        A scalar; 0 when the mask is False everywhere.
    Gradient: m / denominator to x; none to the denominator.
    Raises:
        ValueError: mask not bool, other shape, or a denominator that is not positive while tokens count.
    Source: "token-mean" of verl, on which the SDAR, SEED and OPID trainers stand.
    Deviates: the denominator can be the whole batch's; a mean of micro-batch means favours tokens of short ones.
    """
    (x,) = mask_inputs(mask, x=x)
    return x.sum() / _denominator(denominator, counted=int(mask.sum()))


def sequence_mean(
    x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], denominator: Tensor | float | int | None = None
) -> Float[Tensor, ""]:
    """Mean over rows of each row's token mean: every trajectory weighs the same, however long it is.

    As `masked_mean`, but denominator counts the rows of the whole batch that have a token; a row that is masked out
    whole is not counted.
    """
    (x,) = mask_inputs(mask, x=x)
    tokens = mask.sum(-1)
    rows = x.sum(-1) / tokens.clamp(min=1)
    return rows.sum() / _denominator(denominator, counted=int((tokens > 0).sum()))


def _denominator(given: Tensor | float | int | None, *, counted: int) -> float:
    value = float(counted if given is None else given)
    if value > 0:
        return value
    if value == 0 and counted == 0:
        return 1.0  # nothing counts anywhere: the sum is 0, and so is the mean
    raise ValueError(f"denominator must be positive, got {value} for {counted} counted entries")


def group_advantages(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"] | Sequence[Hashable], *, eps: float = 1e-6
) -> Float[Tensor, " B"]:
    """Group-relative advantage, A = (r - mean) / (sd + eps) within the trajectories of one task.

    Args:
        rewards: one return a trajectory [B], in the environment's reward unit.
        group_ids: [B] integers, or a sequence of B task ids; equal means same group.
        eps: added to the sample standard deviation (n - 1).
    Returns:
        Advantages [B], in standard deviations of the group. Exactly 0 in a group of one or of equal rewards.
    Gradient: none.
    Raises:
        ValueError: different lengths, or a reward that is not finite.
    Source: GRPO, arXiv 2402.03300, section 4.1.2; eps as in verl.
    Deviates: degenerate groups are exactly 0 and counted (`degenerate_groups`), not rounding noise over eps.
    """
    advantages = torch.zeros_like(rewards)
    for member in _groups(rewards, group_ids):
        group = rewards[member].detach()
        if not _degenerate(group):
            advantages[member] = (group - group.mean()) / (group.std() + eps)
    return advantages


def degenerate_groups(rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"] | Sequence[Hashable]) -> int:
    """Number of groups that teach nothing: a single trajectory, or equal rewards. Arguments as `group_advantages`."""
    return sum(_degenerate(rewards[member]) for member in _groups(rewards, group_ids))


def _groups(rewards: Tensor, group_ids: Tensor | Sequence[Hashable]) -> list[Tensor]:
    """One bool index [B] for every group."""
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids")
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    names = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    return [torch.tensor([n == name for n in names], device=rewards.device) for name in dict.fromkeys(names)]


def _degenerate(group: Tensor) -> bool:
    return bool(group.max() - group.min() <= EQUAL_REWARDS)  # true of a group of one as well


def policy_loss(
    student_logp: Float[Tensor, "B T"],
    behaviour_logp: Float[Tensor, "B T"],
    advantages: Advantage,
    response_mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Tensor, "B T"]:
    """Clipped surrogate, -min(ρ·A, clip(ρ, 1 - clip_low, 1 + clip_high)·A) with ρ = e^(s - o).

    Args:
        student_logp: s, log π_θ of the sampled tokens [B, T], nats.
        behaviour_logp: o, log-probability the sampling policy gave them [B, T], nats.
        advantages: A, [B] a trajectory or [B, T] a token, in reward standard deviations.
        response_mask: [B, T], bool, True = counts.
        clip_low, clip_high: how far ρ may fall below and rise above 1 before its gradient stops.
    Returns:
        Per-token losses [B, T], 0 at masked positions.
    Gradient: to student_logp only; -A where s = o.
    Raises:
        ValueError: mask not bool, or a shape that does not fit.
    Source: PPO, arXiv 1707.06347, equation 7, as used by GRPO (arXiv 2402.03300, equation 3).
    """
    s, o = mask_inputs(response_mask, student_logp=student_logp, behaviour_logp=behaviour_logp.detach())
    (a,) = mask_inputs(response_mask, advantages=per_token(advantages, response_mask).detach())
    ratio = (s - o).exp()
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)


def per_token(advantages: Tensor, response_mask: Tensor) -> Float[Tensor, "B T"]:
    """Spread one advantage a trajectory [B] over its tokens; [B, T] stays as it is."""
    if advantages.dim() == 2:
        return advantages
    if advantages.shape != response_mask.shape[:1]:
        raise ValueError(
            f"advantages {list(advantages.shape)} do not fit tokens of shape {list(response_mask.shape)}"
        )
    return advantages.unsqueeze(-1).expand(response_mask.shape)


def kl_penalty(
    student_logp: Float[Tensor, "B T"],
    reference_logp: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    kind: str = "low_variance",
) -> Float[Tensor, "B T"]:
    """Per-token estimate of KL(π_θ ‖ π_ref) on the student's samples, d = r - s.

    "low_variance": e^d - 1 - d, never negative. "squared": d²/2, whose gradient is the exact sampled reverse-KL one.
    Log-ratios themselves (s - r) are no choice: as a loss their expected gradient is zero.

    Args:
        student_logp: s [B, T], nats.
        reference_logp: r, the reference policy's log-probability of the same tokens [B, T], nats.
        response_mask: [B, T], bool, True = counts.
        kind: "low_variance" or "squared".
    Returns:
        Per-token losses [B, T] in nats, 0 at masked positions.
    Gradient: to student_logp only: 1 - e^d ("low_variance") or -d ("squared"); 0 where the policies agree.
    Raises:
        ValueError: unknown kind, mask not bool, other shape.
    Source: k3 and k2 of Schulman's note on approximating KL divergence; GRPO, equation 4; verl's `low_var_kl`.
    Deviates: above d = MAX_NATS the exponential goes on as its tangent, so that the gradient stays finite and keeps
        its sign; verl clamps, which stops the gradient there.
    """
    s, r = mask_inputs(response_mask, student_logp=student_logp, reference_logp=reference_logp)
    d = r.detach() - s
    if kind == "squared":
        return d.square() / 2
    if kind == "low_variance":
        capped = d.clamp(max=MAX_NATS)
        return capped.exp() * (1 + d - capped) - 1 - d
    raise ValueError(f'unknown kind of KL {kind!r}; choose "low_variance" or "squared"')
