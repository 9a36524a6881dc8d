"""The skill-induced shift, its gate, and the distillation terms built from them.

Implements the sampled-token terms of SDAR and SEED (gated), GRPO+OPSD (plain) and Skill-SD as their code has them,
and two that follow the teacher's sign: the centred gate (ours) and the sampled reverse KL. Each loss stands beside
its closed-form effect on the token (`distill_weights`).
Leaves out KL over the whole vocabulary, which needs logits, and schedules of the coefficient.

All log-probabilities are of the sampled response tokens, in nats, [B, T].
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from seedkit.objective import MAX_NATS, mask_inputs

KINDS = ("gated", "plain", "centred", "skill_sd", "reverse_kl_sampled")


def gate_weights(gap: Float[Tensor, "*shape"], *, beta: float | int) -> Float[Tensor, "*shape"]:
    """Gate σ(β·Δ): near 1 where the skill endorses the token, near 0 where it does not, 1/2 where it says nothing.

    Args:
        gap: Δ = teacher - student log-probability, any shape, nats.
        beta: steepness, 1/nat, at least 0 (0 switches the gate to 1/2 everywhere).
    Returns:
        Gates in [0, 1], same shape.
    Gradient: none; the gate is detached.
    Raises:
        ValueError: beta negative or not finite.
    Source: SDAR, arXiv 2605.15155; beta 5 in its published scripts.
    """
    if not (math.isfinite(beta) and beta >= 0):
        raise ValueError(f"beta must be finite and at least 0, got {beta}")
    return torch.sigmoid(beta * gap.detach())


def distill_loss(
    student_logp: Float[Tensor, "B T"],
    teacher_logp: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    *,
    kind: str = "gated",
    beta: float | int = 5.0,
    behaviour_logp: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Per-token distillation loss, to be minimised; d = k - s, Δ = sg[d], ρ = e^(s - o).

        gated               σ(βΔ)·d             raises every token, by σ(βΔ)
        plain               d                   raises every token, by 1
        centred             (σ(βΔ) - 1/2)·d     raises or lowers it, by σ(βΔ) - 1/2
        skill_sd            ρ·(e^d - 1 - d)     raises or lowers it, by ρ·Δ
        reverse_kl_sampled  d²/2                raises or lowers it, by Δ

    Only skill_sd and reverse_kl_sampled are divergences. The first three may be negative, and the first two have a
    gradient where teacher equals student: they imitate the policy's own samples.

    Args:
        student_logp: s, the ordinary context [B, T], nats.
        teacher_logp: k, the same tokens under the skill-augmented context [B, T], nats.
        response_mask: [B, T], bool, True = counts.
        kind: one of `KINDS`.
        beta: gate steepness, 1/nat ("gated" and "centred").
        behaviour_logp: o, the sampling policy's log-probability [B, T], nats ("skill_sd"); None means o = sg[s].
    Returns:
        Per-token losses [B, T], exactly 0 at masked positions.
    Gradient: to student_logp only; teacher, behaviour policy and gate are detached.
    Raises:
        ValueError: unknown kind, mask not bool, other shape, beta negative or not finite.
    Source: SDAR arXiv 2605.15155, SEED 2607.14777, OPSD 2601.18734, Skill-SD 2604.10674, in the form of
        ZJU-REAL/SDAR at a223108.
    Deviates: skill_sd is written e^(k-o) - ρ·(1 + d), the same value without the cancellation that ruins its gradient
        at large Δ, with k - o capped at MAX_NATS; the capped part is a constant, so no gradient changes.
    """
    o = student_logp if behaviour_logp is None else behaviour_logp
    s, k, o = mask_inputs(response_mask, student_logp=student_logp, teacher_logp=teacher_logp, behaviour_logp=o)
    k, o = k.detach(), o.detach()
    d = k - s
    gate = gate_weights(d, beta=beta)
    losses = {  # at masked positions s = k = o = 0, where each of them is 0
        "gated": gate * d,
        "plain": d,
        "centred": (gate - 0.5) * d,
        "skill_sd": (k - o).clamp(max=MAX_NATS).exp() - (s - o).exp() * (1 + d),
        "reverse_kl_sampled": d.square() / 2,
    }
    return losses[_known(kind)]


def distill_weights(
    gap: Float[Tensor, "*shape"],
    *,
    kind: str = "gated",
    beta: float | int = 5.0,
    ratio: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """What `distill_loss` does to a token: minus its derivative by the student's log-probability, in closed form.

    Args:
        gap: Δ, any shape, nats.
        kind: one of `KINDS`.
        beta: gate steepness, 1/nat.
        ratio: ρ = e^(s - o), same shape; None means 1, the policy that sampled.
    Returns:
        Weights of ∇log π, same shape; positive raises the token's probability.
    Gradient: none.
    Raises:
        ValueError: unknown kind, beta negative or not finite.
    """
    gap = gap.detach()
    gate = gate_weights(gap, beta=beta)
    weights = {
        "gated": gate,
        "plain": torch.ones_like(gap),
        "centred": gate - 0.5,
        "skill_sd": gap if ratio is None else ratio.detach() * gap,
        "reverse_kl_sampled": gap,
    }
    return weights[_known(kind)]


def no_effect(gap: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], tol: float = 1e-6) -> Bool[Tensor, " B"]:
    """Flag rows in which the skill changed nothing: |Δ| ≤ tol (nats) at every token that counts.

    A row without any such token is not flagged: it has no signal, which `Shifts.skill_tokens` reports.
    """
    (gap,) = mask_inputs(mask, gap=gap)
    return (gap.abs() <= tol).all(-1) & mask.any(-1)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
    return kind
