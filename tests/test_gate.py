"""Gate and distillation terms: the number table's rows 1-5 and 12, gradients, masks, signs, refusals."""

import inspect

import pytest
import torch

from seedkit.gate import KINDS, distill_loss, distill_weights, gate_weights, no_effect
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
