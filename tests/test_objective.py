"""Reductions, advantages, policy loss and KL: the number table's rows 6-10, gradients, masks, refusals."""

import inspect

import pytest
import torch

from seedkit.gate import distill_loss
from seedkit.objective import (
    MAX_NATS,
    degenerate_groups,
    group_advantages,
    kl_penalty,
    masked_mean,
    policy_loss,
    sequence_mean,
)

NAN = float("nan")
REDUCTIONS = [masked_mean, sequence_mean]


def rows(*values):
    """A batch [B, T] in float64."""
    return torch.tensor(values, dtype=torch.float64)


def ones(x):
    return torch.ones_like(x, dtype=torch.bool)


def close(got, expected, atol=1e-6):
    got, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (got, expected))
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_row_06_a_row_masked_out_whole(reduce):
    s = rows([-1.0, -2.0], [NAN, -1.0]).requires_grad_()
    k = rows([-0.5, -2.5], [NAN, NAN])
    mask = torch.tensor([[True, True], [False, False]])
    loss = reduce(distill_loss(s, k, mask), mask)
    loss.backward()
    assert s.grad is not None
    close(loss, 0.212071)  # (.924142 - .075858)·.5 / 2: the empty row is not counted
    assert s.grad[1].tolist() == [0.0, 0.0]
    assert (s.grad[0] != 0).all()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_row_06_everything_masked_out(reduce):
    x = rows([NAN, 1.0]).requires_grad_()
    for denominator in (None, 0):
        loss = reduce(x, ~ones(x), denominator)
        assert loss.item() == 0.0
        (grad,) = torch.autograd.grad(loss, x)
        assert grad.tolist() == [[0.0, 0.0]]


def test_row_07_token_mean_has_a_global_denominator():
    first, second = rows([1.0]), rows([3.0, 3.0, 3.0])
    total = 1 + 3
    parts = masked_mean(first, ones(first), total) + masked_mean(second, ones(second), total)
    close(parts, 2.5)  # (1 + 9) / 4
    close(
        (masked_mean(first, ones(first)) + masked_mean(second, ones(second))) / 2, 2.0
    )  # the mean of means is not it


def test_row_08_token_mean_and_sequence_mean():
    x = torch.zeros(2, 9, dtype=torch.float64)
    x[0, 0] = 1.0
    mask = ones(x)
    mask[0, 1:] = False
    close(masked_mean(x, mask), 0.1)  # 1 / (1 + 9)
    close(sequence_mean(x, mask), 0.5)  # (1/1 + 0/9) / 2


def test_sequence_mean_adds_up_over_micro_batches():
    x, mask = rows([1.0, 5.0], [2.0, 4.0], [7.0, NAN]), torch.tensor([[True, True], [True, True], [True, False]])
    parts = sequence_mean(x[:1], mask[:1], 3) + sequence_mean(x[1:], mask[1:], torch.tensor(3))
    close(parts, sequence_mean(x, mask))
    close(parts, 13 / 3)  # (3 + 3 + 7) / 3


def test_row_09_group_advantages_use_the_sample_sd():
    rewards = torch.tensor([1.0] + [0.0] * 7, dtype=torch.float64)
    # mean .125; sd = √((.875² + 7·.125²) / 7) = .353553; (1 - .125) / (.353553 + 1e-6) = 2.474867
    advantages = group_advantages(rewards, torch.zeros(8, dtype=torch.long))
    close(advantages, [2.474867] + [-0.353553] * 7, atol=2e-6)
    assert degenerate_groups(rewards, torch.zeros(8, dtype=torch.long)) == 0


def test_row_10_degenerate_groups_are_zero_and_counted():
    rewards = rows(0.3, 0.1 + 0.2, 0.3, 1.0, 1.0, 0.0)  # .1 + .2 is .3 but for rounding: the spread is not 0
    assert rewards[0] != rewards[1]
    ids = ["a", "a", "a", "alone", "c", "c"]
    advantages = group_advantages(rewards, ids)
    assert advantages[:4].tolist() == [0.0] * 4
    close(advantages[4:], [0.707106, -0.707106], atol=2e-6)  # ±.5 / (.707107 + 1e-6)
    assert degenerate_groups(rewards, ids) == 2


def test_groups_are_independent_of_their_order():
    rewards, ids = torch.tensor([1.0, 5.0, 0.0, 9.0]), torch.tensor([7, 3, 7, 3])
    shuffle = torch.tensor([3, 0, 2, 1])
    torch.testing.assert_close(
        group_advantages(rewards, ids)[shuffle], group_advantages(rewards[shuffle], ids[shuffle])
    )


def gradient(loss, student):
    (grad,) = torch.autograd.grad(loss.sum(), student)
    return grad


def test_policy_loss_at_the_sampling_policy_is_minus_the_advantage():
    s = rows([-1.0, -2.0], [-3.0, -0.1]).requires_grad_()
    loss = policy_loss(s, s.detach(), torch.tensor([2.0, -0.5], dtype=torch.float64), ones(s))
    close(loss.detach(), rows([-2.0, -2.0], [0.5, 0.5]))
    close(gradient(loss, s), rows([-2.0, -2.0], [0.5, 0.5]))


def test_policy_loss_clips_on_its_own_side_only():
    o = rows([-1.0, -1.0, -1.0, -1.0])
    ratio = rows([1.5, 0.5, 1.5, 0.5])
    s = (o + ratio.log()).requires_grad_()
    advantages = rows([1.0, 1.0, -1.0, -1.0])
    loss = policy_loss(s, o, advantages, ones(s), clip_low=0.2, clip_high=0.3)
    # A > 0: -min(1.5, 1.3) and -min(.5, .8); A < 0: -min(-1.5, -1.3) and -min(-.5, -.8)
    close(loss.detach(), rows([-1.3, -0.5, 1.5, 0.8]))
    close(gradient(loss, s), rows([0.0, -0.5, 1.5, 0.0]))  # -A·ρ where not clipped


def test_policy_loss_ignores_masked_positions():
    s = rows([-1.0, NAN]).requires_grad_()
    mask = torch.tensor([[True, False]])
    loss = policy_loss(s, rows([-1.1, NAN]), rows([1.0, NAN]), mask)
    assert loss[0, 1] == 0.0
    assert gradient(loss, s)[0, 1] == 0.0
    assert torch.isfinite(loss[0, 0])


def test_changing_masked_log_probs_changes_nothing():
    """Observation tokens stand in the sequence; their log-probabilities must not matter."""
    mask, advantage = torch.tensor([[True, False, True]]), torch.tensor([1.5], dtype=torch.float64)
    o = rows([-1.2, -0.5, -0.4])
    one, other = rows([-1.0, -2.0, -0.5]), rows([-1.0, -9.0, -0.5])
    assert torch.equal(policy_loss(one, o, advantage, mask), policy_loss(other, o, advantage, mask))
    assert torch.equal(kl_penalty(one, o, mask), kl_penalty(other, o, mask))


def test_kl_low_variance_by_hand():
    s, r = rows([-1.0, -1.0, -1.0]).requires_grad_(), rows([-0.5, -2.0, -1.0])
    loss = kl_penalty(s, r, ones(s))
    # d = .5, -1, 0: e^.5 - 1.5 = .148721, e^-1 - 1 + 1 = .367879, 0
    close(loss.detach(), rows([0.148721, 0.367879, 0.0]))
    close(gradient(loss, s), rows([-0.648721, 0.632121, 0.0]))  # 1 - e^d: towards the reference, 0 where they agree


def test_kl_squared_by_hand():
    s, r = rows([-1.0, -1.0]).requires_grad_(), rows([-0.5, -2.0])
    loss = kl_penalty(s, r, ones(s), kind="squared")
    close(loss.detach(), rows([0.125, 0.5]))  # d² / 2
    close(gradient(loss, s), rows([-0.5, 1.0]))  # -d


@pytest.mark.parametrize("kind", ["low_variance", "squared"])
def test_kl_properties(kind):
    s = rows([-1.0, NAN, -2.0, -90.0]).requires_grad_()
    r = rows([-3.0, NAN, -1.0, -0.1]).requires_grad_()
    mask = torch.tensor([[True, False, True, True]])
    loss = kl_penalty(s, r, mask, kind=kind)
    loss.sum().backward()
    assert s.grad is not None
    assert r.grad is None
    assert (loss >= 0).all()
    assert loss[0, 1] == 0.0
    assert torch.isfinite(s.grad).all()
    assert s.grad.sign().tolist() == [[1.0, 0.0, -1.0, -1.0]]  # lowered, masked, raised, raised however far off


def test_kl_goes_on_as_its_tangent():
    d = MAX_NATS + 2
    s = rows([-d]).requires_grad_()
    loss = kl_penalty(s, rows([0.0]), ones(s))
    top = torch.tensor(MAX_NATS).double().exp()
    close(loss.detach(), (top * 3 - 1 - d).reshape(1, 1))
    close(gradient(loss, s), (1 - top).reshape(1, 1))


@pytest.mark.parametrize("kind", ["low_variance", "squared"])
def test_kl_gradient_is_that_of_its_value(kind):
    r = rows([-0.5, -2.5, -1.0])
    assert torch.autograd.gradcheck(
        lambda x: kl_penalty(x, r, ones(r), kind=kind), (rows([-1.0, -2.0, -0.2]).requires_grad_(),)
    )


X, MASK = rows([1.0, 2.0]), torch.ones(1, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (masked_mean, (X, torch.ones(1, 2)), "must be bool"),
        (masked_mean, (X, MASK[:, :1]), "x has shape"),
        (masked_mean, (X, MASK, -4), "denominator must be positive, got -4.0"),
        (masked_mean, (X, MASK, 0), "denominator must be positive, got 0.0 for 2 counted"),
        (sequence_mean, (X, MASK, NAN), "denominator must be positive"),
        (policy_loss, (X, X[:, :1], X, MASK), "behaviour_logp has shape"),
        (policy_loss, (X, X, torch.ones(3), MASK), "advantages .* do not fit"),
        (policy_loss, (X, X, X[:, :1], MASK), "advantages has shape"),
        (kl_penalty, (X, X[:, :1], MASK), "reference_logp has shape"),
        (group_advantages, (torch.ones(3), [1, 2]), "3 rewards but 2 group ids"),
        (group_advantages, (torch.tensor([1.0, NAN]), [1, 1]), "rewards must be finite"),
    ],
)
def test_refusals(function, arguments, message):
    with pytest.raises(ValueError, match=message):  # unwrapped: the type checker of the test run would answer first
        inspect.unwrap(function)(*arguments)


def test_kl_refuses_the_estimator_without_gradient():
    with pytest.raises(ValueError, match="unknown kind of KL 'k1'"):
        kl_penalty(X, X, MASK, kind="k1")
