"""Gate, distillation terms and divergences: rows 1-5 and 12, hand-worked numbers, gradients, masks, signs."""

import functools
import inspect
import math

import pytest
import torch

from seedkit.gate import (
    COMBINATIONS,
    KINDS,
    combine_teachers,
    distill_loss,
    distill_weights,
    forward_kl_full,
    gate_weights,
    js_full,
    no_effect,
    reverse_kl_full,
)
from seedkit.objective import MAX_NATS, masked_mean

NAN = float("nan")


def row(*values, dtype=torch.float64):
    """One sample [1, T]."""
    return torch.tensor([values], dtype=dtype)


def ones(x):
    return torch.ones_like(x, dtype=torch.bool)


def gradient(s, k, mask=None, **options):
    """Token-mean loss and its gradient by the student's log-probabilities."""
    s = s.clone().requires_grad_()
    mask = ones(s) if mask is None else mask
    loss = masked_mean(distill_loss(s, k, mask, **options), mask)
    loss.backward()
    assert s.grad is not None
    return loss.item(), s.grad


def close(got, expected, atol=1e-6):
    got, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (got, expected))
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_row_01_gated_loss_and_gradient():
    s, k = row(-1.0, -2.0, -0.5), row(-0.5, -2.5, -0.5)
    # Δ = .5, -.5, 0; σ(2.5) = 1/(1 + e^-2.5) = 1/1.082085 = .924142, σ(-2.5) = .075858, σ(0) = .5
    close(gate_weights(k - s, beta=5.0), row(0.924142, 0.075858, 0.5))
    loss, grad = gradient(s, k, beta=5.0)
    close(loss, 0.141381)  # (.924142·.5 - .075858·.5 + 0) / 3 = .424142 / 3
    close(grad, row(-0.308047, -0.025286, -0.166667))  # -gate / 3


def test_row_02_teacher_equals_student_and_the_flag():
    s = row(-1.0, -2.0)
    loss, grad = gradient(s, s, beta=5.0)
    assert loss == 0.0
    close(grad, row(-0.25, -0.25))  # -σ(0) / 2: the published term pushes although the teacher says nothing
    assert no_effect(s - s, ones(s)).tolist() == [True]


def test_row_03_beta_zero_is_half_of_imitation():
    s, k = row(-1.0, -1.0), row(-0.5, -1.5)
    close(gate_weights(k - s, beta=0), row(0.5, 0.5))
    loss, grad = gradient(s, k, beta=0)
    close(loss, 0.0)  # (.5·.5 - .5·.5) / 2
    close(grad, row(-0.25, -0.25))


def test_row_04_masked_nan_reaches_nothing():
    loss, grad = gradient(row(-1.0, -9.0), row(-0.5, NAN), mask=torch.tensor([[True, False]]), beta=5.0)
    close(loss, 0.462071)  # .924142 · .5 / 1
    close(grad, row(-0.924142, 0.0))
    assert grad[0, 1] == 0.0


def test_row_05_extreme_gaps_stay_finite():
    s, k = row(-0.01, -40.0), row(-60.0, -0.01)  # Δ = -59.99, +39.99
    close(gate_weights(k - s, beta=5.0), row(0.0, 1.0))
    loss, grad = gradient(s, k, beta=5.0)
    close(loss, 19.995)  # (0·-59.99 + 1·39.99) / 2
    close(grad, row(0.0, -0.5))


@pytest.mark.parametrize(("behaviour", "expected"), [(-1.0, 0.148721), (-1.2, 0.181649)])
def test_row_12_skill_sd(behaviour, expected):
    # d = .5: e^.5 - 1 - .5 = .148721; ρ = e^(-1 + 1) = 1 or e^(-1 + 1.2) = 1.221403, times .148721 = .181649
    loss, grad = gradient(row(-1.0), row(-0.5), kind="skill_sd", behaviour_logp=row(behaviour))
    close(loss, expected)
    close(grad, row(-0.5 * torch.tensor(-1.0 - behaviour).exp().item()))  # the two derivatives cancel to -ρ·Δ


def test_skill_sd_without_behaviour_policy_is_on_policy():
    s, k = row(-1.0, -3.0), row(-0.5, -4.0)
    assert gradient(s, k, kind="skill_sd")[0] == gradient(s, k, kind="skill_sd", behaviour_logp=s)[0]
    close(gradient(s, k, kind="skill_sd")[1], -(k - s) / 2)


def test_other_kinds_by_hand():
    s, k = row(-1.0, -2.0), row(-0.5, -2.5)  # Δ = .5, -.5
    options = {"beta": 5.0}
    close(gradient(s, k, kind="plain", **options)[1], row(-0.5, -0.5))  # -1 / 2, whatever the teacher says
    loss, grad = gradient(s, k, kind="centred", **options)
    close(loss, 0.212071)  # (.424142·.5 + .424142·.5) / 2
    close(grad, row(-0.212071, 0.212071))  # -(σ - .5) / 2
    loss, grad = gradient(s, k, kind="reverse_kl_sampled", **options)
    close(loss, 0.125)  # (.5²/2 + .5²/2) / 2
    close(grad, row(-0.25, 0.25))  # -Δ / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("off_policy", [False, True])
def test_closed_form_equals_autograd(kind, off_policy):
    random = torch.Generator().manual_seed(0)
    s, k, o = (-3 * torch.rand(4, 7, generator=random, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(4, 7, generator=random) > 0.3
    s.requires_grad_()
    behaviour, ratio = (o, (s - o).exp()) if off_policy else (None, None)
    distill_loss(s, k, mask, kind=kind, beta=3.0, behaviour_logp=behaviour).sum().backward()
    expected = torch.where(mask, distill_weights(k - s, kind=kind, beta=3.0, ratio=ratio), 0.0)
    torch.testing.assert_close(s.grad, -expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "skill_sd", "reverse_kl_sampled"])
def test_gradient_is_that_of_the_loss_value(kind):
    """Kinds without a detached gate: autograd against finite differences."""
    s, k, o = row(-1.0, -2.0, -0.3).requires_grad_(), row(-0.5, -2.5, -4.0), row(-1.1, -1.8, -0.3)
    assert torch.autograd.gradcheck(lambda x: distill_loss(x, k, ones(k), kind=kind, behaviour_logp=o), (s,))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_positions_contribute_nothing(kind):
    mask = torch.tensor([[True, False, True]])
    s = row(-1.0, NAN, -2.0).requires_grad_()
    k, o = row(-0.5, float("inf"), -2.5), row(-1.1, NAN, -1.9)
    loss = distill_loss(s, k, mask, kind=kind, behaviour_logp=o)
    assert loss.shape == (1, 3)
    assert loss[0, 1] == 0.0
    loss.sum().backward()
    assert s.grad is not None
    assert s.grad[0, 1] == 0.0
    short = distill_loss(
        row(-1.0, -2.0), row(-0.5, -2.5), ones(row(0.0, 0.0)), kind=kind, behaviour_logp=row(-1.1, -1.9)
    )
    torch.testing.assert_close(loss[mask].detach(), short[0])  # as if the token had not been there


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_equals_student(kind):
    s = row(-1.0, -2.0)
    loss, grad = gradient(s, s, kind=kind)
    assert loss == 0.0
    close(grad, row(*[{"gated": -0.25, "plain": -0.5}.get(kind, 0.0)] * 2))


@pytest.mark.parametrize(
    ("kind", "endorsed", "rejected"),
    [("gated", 1, 1), ("plain", 1, 1), ("centred", 1, -1), ("skill_sd", 1, -1), ("reverse_kl_sampled", 1, -1)],
)
def test_direction_of_the_push(kind, endorsed, rejected):
    """The first two never lower a token; the others follow the teacher."""
    push = -gradient(row(-2.0, -2.0), row(-1.0, -3.0), kind=kind)[1]
    assert push.sign().tolist() == [[endorsed, rejected]]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_student_receives_a_gradient(kind):
    s, k, o = (row(x).requires_grad_() for x in (-1.0, -0.5, -1.2))
    distill_loss(s, k, ones(s), kind=kind, behaviour_logp=o).sum().backward()
    assert s.grad is not None
    assert k.grad is None
    assert o.grad is None
    assert not gate_weights(k - s, beta=5.0).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_float32_survives_large_shifts(kind):
    s, k = row(-40.0, -0.01, dtype=torch.float32), row(-0.0, -60.0, dtype=torch.float32)
    loss, grad = gradient(s, k, kind=kind)
    assert torch.isfinite(torch.tensor(loss))
    close(grad, -distill_weights(k - s, kind=kind) / 2, atol=1e-5)  # skill_sd too: exactly -Δ, not rounding noise


def test_skill_sd_value_is_capped_and_its_gradient_is_not():
    below, above = row(-30.0), row(-30.0 + MAX_NATS + 5)
    loss, grad = gradient(below, above, kind="skill_sd")
    close(loss, torch.tensor(MAX_NATS).double().exp() - 1 - (MAX_NATS + 5))
    close(grad, row(-(MAX_NATS + 5)))


def test_no_effect_by_row():
    gap = torch.tensor([[0.0, 5e-7], [0.0, 0.1], [0.0, 0.1], [0.0, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    assert no_effect(gap, mask).tolist() == [True, False, True, False]
    assert no_effect(gap, mask, 0.2).tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "gate"}, "unknown kind 'gate'; choose one of gated, plain"),
        ({"teacher_logp": row(-1.0)}, r"teacher_logp has shape \[1, 1\] but the mask has \[1, 2\]"),
        ({"behaviour_logp": row(-1.0)}, r"behaviour_logp has shape"),
        ({"response_mask": torch.ones(1, 2)}, "must be bool .* got torch.float32"),
        ({"beta": -1.0}, "beta must be finite and at least 0, got -1.0"),
        ({"beta": NAN}, "beta must be finite"),
        ({"beta": float("inf")}, "beta must be finite"),
    ],
)
def test_refusals(change, message):
    arguments = {
        "student_logp": row(-1.0, -2.0),
        "teacher_logp": row(-1.0, -2.0),
        "response_mask": ones(row(0.0, 0.0)),
    }
    with pytest.raises(ValueError, match=message):  # unwrapped: the type checker of the test run would answer first
        inspect.unwrap(distill_loss)(**(arguments | change))


def test_closed_form_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match="unknown kind"):
        distill_weights(row(0.5), kind="nope")


# --- whole distributions


def dists(*rows):
    """Log-probabilities [1, T, V] of the given probabilities."""
    return torch.tensor([rows], dtype=torch.float64).log()


def logit_gradient(loss, student, teacher, mask=None, **options):
    """Value of a divergence [B, T], and the gradient of its sum by the student's logits [B, T, V]."""
    logits = student.clone().requires_grad_()
    value = loss(torch.log_softmax(logits, -1), teacher, ones(student[..., 0]) if mask is None else mask, **options)
    value.sum().backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


def random_dists(v=6, seed=0):
    random = torch.Generator().manual_seed(seed)
    s, k = (torch.log_softmax(2 * torch.randn(3, 5, v, generator=random, dtype=torch.float64), -1) for _ in range(2))
    return s, k, torch.rand(3, 5, generator=random) > 0.3


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1, keepdim=True)


CLOSED = {  # what falls on the logit of each token
    reverse_kl_full: lambda s, k: s.exp() * (s - k - kl(s, k)),
    forward_kl_full: lambda s, k: s.exp() - k.exp(),
    js_full: lambda s, k: s.exp() * (s - mix(s, k) - kl(s, mix(s, k))) / 2,
}


def mix(s, k):
    return ((s.exp() + k.exp()) / 2).log()


@pytest.mark.parametrize(
    ("loss", "value", "push"),
    [
        # p = (3/4, 1/4), q = (1/2, 1/2): .75·ln 1.5 + .25·ln .5 = .304099 - .173287
        (reverse_kl_full, 0.130812, 0.205990),  # .75·(ln 1.5 - .130812) = .75·.274653
        (forward_kl_full, 0.143841, 0.25),  # .5·ln(2/3) + .5·ln 2 = -.202733 + .346574; p - q
        # m = (5/8, 3/8): ½(.75·ln 1.2 + .25·ln(2/3)) + ½(.5·ln .8 + .5·ln(4/3)) = ½(.035375) + ½(.032269)
        (js_full, 0.033822, 0.055105),  # ½·.75·(ln 1.2 - .035375) = .375·.146947
    ],
)
def test_divergences_by_hand(loss, value, push):
    got, grad = logit_gradient(loss, dists([0.75, 0.25]), dists([0.5, 0.5]))
    close(got, [[value]])
    close(grad, [[[push, -push]]])


def test_top_k_keeps_the_tail():
    # .5·ln(5/4) + .3·ln(3/2) = .233212 for the two kept; the bucket .2·ln(.2/.4) = -.138629
    s, k = dists([0.5, 0.1, 0.3, 0.1]), dists([0.4, 0.3, 0.2, 0.1])
    got, grad = logit_gradient(reverse_kl_full, s, k, top_k=2)
    close(got, [[0.094582]])
    bucket = [1.25, 0.5, 1.5, 0.5]  # p/q of the bucket each token is in
    close(grad, [[[p * (math.log(r) - 0.094582) for p, r in zip((0.5, 0.1, 0.3, 0.1), bucket, strict=True)]]])
    close(logit_gradient(reverse_kl_full, s, k)[0], [[0.123350]])  # exact: .233212 + .1·ln(1/3) + .1·0


@pytest.mark.parametrize("top_k", [5, 6, 7])  # 5 of 6: the bucket holds one token
def test_top_k_of_everything_is_exact(top_k):
    s, k, mask = random_dists()
    for some, exact in zip(
        logit_gradient(reverse_kl_full, s, k, mask, top_k=top_k),
        logit_gradient(reverse_kl_full, s, k, mask),
        strict=True,
    ):
        close(some, exact, atol=1e-12)


def test_top_k_is_a_lower_bound_that_grows_with_k():
    s, k, mask = random_dists()
    values = torch.stack([reverse_kl_full(s, k, mask, top_k=n) for n in range(1, 7)])
    assert (values.diff(dim=0) > -1e-12).all() and (values >= 0).all()


@pytest.mark.parametrize("loss", CLOSED)
def test_logit_gradient_in_closed_form(loss):
    s, k, mask = random_dists()
    grad = logit_gradient(loss, s, k, mask)[1]
    close(grad, torch.where(mask.unsqueeze(-1), CLOSED[loss](s, k), 0.0))
    assert grad[~mask].abs().sum() == 0
    teacher_is_student = logit_gradient(loss, s, s, mask)
    close(teacher_is_student[0], torch.zeros(3, 5))
    close(teacher_is_student[1], torch.zeros(3, 5, 6))  # unlike the gated term, no push where the skill says nothing


def test_reverse_kl_sampled_estimates_the_exact_gradient():
    """Over y drawn from the student, the mean of Δ_y·∇log p_y is minus the gradient of the exact divergence."""
    s, k, _ = random_dists()
    weights = distill_weights(k - s, kind="reverse_kl_sampled")  # one a possible token [B, T, V]
    expected = s.exp() * weights - s.exp() * (s.exp() * weights).sum(-1, keepdim=True)  # Σ_y p_y·Δ_y·(e_y - p)
    close(logit_gradient(reverse_kl_full, s, k)[1], -expected, atol=1e-12)


@pytest.mark.parametrize("loss", [*CLOSED, functools.partial(reverse_kl_full, top_k=2)])
def test_masked_nan_and_impossible_tokens_stay_out_of_the_divergences(loss):
    s, k, mask = random_dists()
    bad_s, bad_k = s.clone(), k.clone()
    bad_s[~mask], bad_k[~mask] = NAN, NAN
    bad, good = loss(bad_s.requires_grad_(), bad_k, mask), loss(s.requires_grad_(), k, mask)
    close(bad, good)
    (bad.sum() + good.sum()).backward()
    assert bad_s.grad is not None and bad_s.grad[~mask].abs().sum() == 0
    close(bad_s.grad, s.grad)
    value, grad = logit_gradient(loss, dists([0.5, 0.5, 0.0, 0.0]), dists([0.25, 0.75, 0.0, 0.0]))  # e^-∞
    assert torch.isfinite(value).all() and torch.isfinite(grad).all()
    close(value, logit_gradient(loss, dists([0.5, 0.5]), dists([0.25, 0.75]))[0], atol=1e-5)


@pytest.mark.parametrize("loss", CLOSED)
def test_the_teachers_distribution_receives_no_gradient(loss):
    s, k, mask = random_dists()
    for x in (s, k):
        x.requires_grad_()
    loss(s, k, mask).sum().backward()
    assert s.grad is not None and k.grad is None


def test_js_is_symmetric_and_bounded():
    s, k, mask = random_dists()
    close(js_full(s, k, mask), js_full(k, s, mask), atol=1e-12)
    far = js_full(dists([1 - 1e-12, 1e-12]), dists([1e-12, 1 - 1e-12]), torch.ones(1, 1) > 0)
    close(far, [[math.log(2)]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_dist": torch.zeros(1, 1, 3)}, r"teacher_dist has shape \[1, 1, 3\]"),
        ({"response_mask": torch.ones(1, 1)}, "must be bool"),
        ({"response_mask": torch.ones(1, 2) > 0}, "student_dist has shape"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
    ],
)
def test_divergences_refuse(change, message):
    arguments = {"student_dist": torch.zeros(1, 1, 2), "teacher_dist": torch.zeros(1, 1, 2)}
    arguments |= {"response_mask": torch.ones(1, 1) > 0}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(reverse_kl_full)(**(arguments | change))


# --- several teachers


@pytest.mark.parametrize(
    ("gaps", "mean", "largest", "agreed"),
    [
        ((0.5, 0.2), 0.35, 0.5, 0.2),
        ((-0.5, -0.3), -0.4, -0.3, -0.3),
        ((0.5, -0.3), 0.1, 0.5, 0.0),  # they disagree: nothing is said
        ((NAN, -0.3), -0.3, -0.3, -0.3),  # one skill did not arrive: it has no say
        ((NAN, NAN), 0.0, 0.0, 0.0),
    ],
)
def test_several_teachers_by_hand(gaps, mean, largest, agreed):
    s = row(-1.0).requires_grad_()
    k = torch.tensor([[[-1 + g]] for g in gaps], dtype=torch.float64)
    for how, expected in (("mean", mean), ("max", largest), ("agreement", agreed)):
        logp, mask = combine_teachers(s, k, ~k.isnan(), how=how)
        close(logp, [[-1 + expected]], atol=1e-12)
        assert not logp.requires_grad
        assert mask.tolist() == [[not all(map(math.isnan, gaps))]]


def test_gates_of_several_teachers():
    s, k, mask = random_dists(v=4)
    s, k, mask = s[..., 0], k.permute(2, 0, 1), mask.expand(4, -1, -1)
    gates = gate_weights(k - s, beta=5.0).where(mask, 0.5)
    gate = {how: gate_weights(combine_teachers(s, k, mask, how=how)[0] - s, beta=5.0) for how in COMBINATIONS}
    close(gate["max"], gates.amax(0))
    nearest = gates.gather(0, (gates - 0.5).abs().argmin(0, keepdim=True))[0]
    same = ((gates > 0.5).all(0)) | ((gates < 0.5).all(0))
    close(gate["agreement"], torch.where(same, nearest, 0.5))
    assert same.any() and not same.all()


def test_several_teachers_refuse():
    k = torch.zeros(2, 1, 1)
    with pytest.raises(ValueError, match="unknown combination 'vote'; choose one of mean, max, agreement"):
        combine_teachers(torch.zeros(1, 1), k, k == 0, how="vote")
    with pytest.raises(ValueError, match="must be bool"):
        inspect.unwrap(combine_teachers)(torch.zeros(1, 1), k, k)
