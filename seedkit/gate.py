"""The skill-induced shift, its gate, and the distillation terms built from them.

Implements the sampled-token terms of SDAR and SEED (gated), GRPO+OPSD (plain) and Skill-SD as their code has them,
and two that follow the teacher's sign: the centred gate (ours) and the sampled reverse KL. Each loss stands beside
its closed-form effect on the token (`distill_weights`). Besides, divergences of the whole next-token distributions
(`reverse_kl_full`, `forward_kl_full`, `js_full`), and several teachers made one (`combine_teachers`).
Leaves out schedules of the coefficient (`Method.fade`).

Log-probabilities are in nats: of the sampled response tokens [B, T], or of all V tokens of the vocabulary [B, T, V].
Student and teacher must have been scored at one temperature, the rollout's, as `Policy` does.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from seedkit.objective import MAX_NATS, mask_inputs

KINDS = ("gated", "plain", "centred", "skill_sd", "reverse_kl_sampled")
COMBINATIONS = ("mean", "max", "agreement")


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


def reverse_kl_full(
    student_dist: Float[Tensor, "B T V"],
    teacher_dist: Float[Tensor, "B T V"],
    response_mask: Bool[Tensor, "B T"],
    *,
    top_k: int | None = None,
) -> Float[Tensor, "B T"]:
    """Exact KL(student ‖ teacher) = Σ_v p_v·(ln p_v - ln q_v) at every position: seeks the teacher's modes.

    With top_k, over the student's k likeliest tokens and one bucket for all others: a lower bound that equals the
    exact value when nothing or one token is left for the bucket, and that still sees mass leaving for the tail.

    Args:
        student_dist: ln p, log-probabilities of the whole vocabulary [B, T, V], nats.
        teacher_dist: ln q, the same under the skill-augmented context [B, T, V], nats.
        response_mask: [B, T], bool, True = counts.
        top_k: number of tokens that keep a bucket of their own; None or ≥ V is exact.
    Returns:
        Per-token divergences [B, T] in nats, exactly 0 at masked positions.
    Gradient: to student_dist only; through a softmax, -p_v·(KL - ln(p_v/q_v)) falls on the logit of token v. The
        choice of the k tokens is not differentiated.
    Raises:
        ValueError: mask not bool, other shape, or top_k below 1.
    Source: the direction of MiniLLM, arXiv 2306.08543; a sum that stops at the k tokens loses the tail (verl #5041).
    """
    s, q = mask_dists(response_mask, student_dist, teacher_dist)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_k is not None and top_k < s.shape[-1]:
        kept = s.detach().topk(top_k).indices
        s, q = (
            torch.cat([x.gather(-1, kept), x.scatter(-1, kept, -math.inf).logsumexp(-1, keepdim=True)], -1)
            for x in (s, q)
        )
    return torch.where(response_mask, (s.exp() * (s - q)).sum(-1), 0.0)


def forward_kl_full(
    student_dist: Float[Tensor, "B T V"], teacher_dist: Float[Tensor, "B T V"], response_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Exact KL(teacher ‖ student) = Σ_v q_v·(ln q_v - ln p_v) at every position: covers the teacher's modes.

    As `reverse_kl_full`, but the gradient on the logit of token v is -(q_v - p_v): towards tokens the student would
    hardly sample, too.
    """
    s, q = mask_dists(response_mask, student_dist, teacher_dist)
    return torch.where(response_mask, (q.exp() * (q - s)).sum(-1), 0.0)


def js_full(
    student_dist: Float[Tensor, "B T V"], teacher_dist: Float[Tensor, "B T V"], response_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Jensen-Shannon divergence, ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = ½(p + q): symmetric, at most ln 2.

    As `reverse_kl_full`, but the gradient on the logit of token v is -½·p_v·(KL(p ‖ m) - ln(p_v/m_v)), bounded
    however far the teacher is.
    """
    s, q = mask_dists(response_mask, student_dist, teacher_dist)
    m = torch.logaddexp(s, q) - math.log(2)
    return torch.where(response_mask, (s.exp() * (s - m) + q.exp() * (q - m)).sum(-1) / 2, 0.0)


def mask_dists(mask: Tensor, student_dist: Tensor, teacher_dist: Tensor) -> list[Tensor]:
    """As `mask_inputs` for distributions [B, T, V], the teacher's detached; a probability of 0 counts as e^-10000."""
    wide = mask.unsqueeze(-1).expand(student_dist.shape) if student_dist.shape[:-1] == mask.shape else mask
    pair = mask_inputs(wide, student_dist=student_dist, teacher_dist=teacher_dist.detach())
    return [x.clamp(min=-1e4) for x in pair]  # 0·(-∞) would be NaN


def combine_teachers(
    student_logp: Float[Tensor, "B T"],
    teacher_logp: Float[Tensor, "K B T"],
    teacher_mask: Bool[Tensor, "K B T"],
    *,
    how: str = "mean",
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """K skills as one teacher, by their shifts Δ_j at each token; a skill that did not arrive has no say.

        mean       the mean shift: the teachers' geometric mean
        max        the largest shift: one skill that endorses the token is enough
        agreement  the shift nearest to 0 where all have one sign, else 0: only what every skill says

    σ being monotone, a gate on the result is the largest gate ("max"), or the one nearest to ½ ("agreement"); for
    "mean" it is the gate of the mean shift, not the mean of the gates. `distill_weights` of the result is the
    closed form, so every kind of term takes several teachers.

    Args:
        student_logp: s [B, T], nats.
        teacher_logp: k_j [K, B, T], nats, one layer a skill.
        teacher_mask: [K, B, T], bool, True where the skill reached the teacher.
        how: one of `COMBINATIONS`.
    Returns:
        The combined teacher's log-probabilities [B, T], and where any skill arrived [B, T].
    Gradient: none.
    Raises:
        ValueError: unknown way, mask not bool, other shape.
    Source: ours; several teachers are an open end of SDAR.
    """
    if how not in COMBINATIONS:
        raise ValueError(f"unknown combination {how!r}; choose one of {', '.join(COMBINATIONS)}")
    s = student_logp.detach()
    (gaps,) = mask_inputs(teacher_mask, teacher_logp=teacher_logp.detach() - s)
    some, low, high = teacher_mask.any(0), gaps.where(teacher_mask, math.inf), gaps.where(teacher_mask, -math.inf)
    gap = {
        "mean": gaps.sum(0) / teacher_mask.sum(0).clamp(min=1),
        "max": high.amax(0),
        "agreement": low.amin(0).clamp(min=0) + high.amax(0).clamp(max=0),
    }[how]
    return s + torch.where(some, gap, 0.0), some


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
    return kind
