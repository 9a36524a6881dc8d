"""The table of methods: closed form against autograd for every row, row 11, one token by hand, your own method."""

import doctest
import inspect
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

import seedkit.methods
from seedkit.gate import KINDS
from seedkit.methods import METHODS, Method, method_losses, resolve, token_weights

NAN = float("nan")


def batch(**change: Any) -> dict[str, Any]:
    """Random log-probabilities with NaN wherever nothing may be read."""
    random, shape = torch.Generator().manual_seed(0), (4, 7)
    s, k, o = (-2 * torch.rand(shape, generator=random, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(shape, generator=random) > 0.3
    teacher_mask = torch.rand(shape, generator=random) > 0.3
    s[~mask], o[~mask], k[~(mask & teacher_mask)] = NAN, NAN, NAN
    advantage = torch.randn(shape[0], generator=random, dtype=torch.float64)
    return {
        "advantage": advantage,
        "student_logp": s,
        "teacher_logp": k,
        "behaviour_logp": o,
        "response_mask": mask,
        "teacher_mask": teacher_mask,
        **change,
    }


def autograd_weights(method, **inputs):
    s = inputs["student_logp"].clone().requires_grad_()
    losses = method_losses(method, **{**inputs, "student_logp": s})
    (grad,) = torch.autograd.grad(torch.stack([*losses.values()]).sum(), s)
    return -grad


def assert_closed_form(method, **inputs):
    expected = token_weights(method, **inputs)
    assert torch.isfinite(expected).all()
    assert expected[~inputs["response_mask"]].abs().sum() == 0
    torch.testing.assert_close(autograd_weights(method, **inputs), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_closed_form_equals_autograd(name, on_policy):
    inputs = batch()
    if on_policy:
        inputs["behaviour_logp"] = None
    for coef in (None, 0.7):  # the papers' λ is small enough to hide a wrong term
        assert_closed_form(name, coef=coef, **inputs)
    inputs["advantage"] = inputs["advantage"].unsqueeze(-1) * torch.linspace(-1, 1, 7, dtype=torch.float64)
    assert_closed_form(name, coef=0.7, beta=1.3, **inputs)


# One token, A = 1, s = o = -1, k = -.5 (Δ = .5) and k = -1.5 (Δ = -.5); σ(±2.5) = .924142, .075858
ONE_TOKEN = {
    "grpo": (1.0, 1.0),
    "skill_grpo": (1.0, 1.0),
    "opsd": (1.0, 1.0),  # λ = 1, no A
    "grpo_opsd": (1.01, 1.01),  # A + .01
    "skill_sd": (1.0005, 0.9995),  # A ± .001 · .5
    "rlsd": (1.1, 0.9),  # .5 + .5 · min(e^.5, 1.2) = 1.1; .5 + .5 · max(e^-.5, .8) = .9
    "sdar": (1.00924142, 1.00075858),  # A + .01 · σ
    "opid": (1.0005, 0.9995),  # A ± .001 · .5
    "seed": (1.00924142, 1.00075858),
    "reverse_kl_sampled": (1.005, 0.995),  # A ± .01 · .5
    "centred": (1.00424142, 0.99575858),  # A + .01 · (σ - .5)
}


@pytest.mark.parametrize("name", METHODS)
def test_every_row_by_hand(name):
    s = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    k = torch.tensor([[-0.5, -1.5]], dtype=torch.float64)
    inputs: dict[str, Any] = {
        "advantage": torch.ones(1, dtype=torch.float64),
        "student_logp": s,
        "response_mask": torch.ones_like(s) > 0,
    }
    expected = torch.tensor([ONE_TOKEN[name]], dtype=torch.float64)
    for weights in (
        token_weights(name, teacher_logp=k, **inputs),
        autograd_weights(name, teacher_logp=k, behaviour_logp=s, **inputs),
    ):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, 1.1), (-1.0, -0.9), (0.0, 0.0)])
def test_row_11_rlsd(advantage, expected):
    # μ = .5, ε = .2, Δ = .5: A·(.5 + .5·clip(e^±.5, .8, 1.2)) = 1·(.5 + .6), -1·(.5 + .4), 0
    s = torch.tensor([[-1.0]], dtype=torch.float64)
    weights = token_weights(
        "rlsd",
        advantage=torch.tensor([advantage], dtype=torch.float64),
        student_logp=s,
        teacher_logp=s + 0.5,
        response_mask=s < 0,
    )
    torch.testing.assert_close(weights, torch.tensor([[expected]], dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_without_a_skill_only_the_grpo_term_is_left(name):
    inputs = batch(teacher_mask=torch.zeros(4, 7, dtype=torch.bool))
    grpo = (
        token_weights("grpo", **inputs) if METHODS[name].policy_gradient else torch.zeros(4, 7, dtype=torch.float64)
    )
    torch.testing.assert_close(token_weights(name, **inputs), grpo, rtol=0, atol=0)
    torch.testing.assert_close(autograd_weights(name, **inputs), grpo, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_losses_are_per_token_and_masked(name):
    inputs = batch()
    losses = method_losses(name, **inputs)
    method = METHODS[name]
    expected = {"policy": method.policy_gradient, "distill": method.term is not None}
    assert set(losses) == {key for key, present in expected.items() if present}
    for loss in losses.values():
        assert loss.shape == (4, 7)
        assert torch.isfinite(loss).all()
        assert loss[~inputs["response_mask"]].abs().sum() == 0
    if "distill" in losses:
        assert losses["distill"][~inputs["teacher_mask"]].abs().sum() == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_teacher_is_asked_for_where_one_is_needed(name):
    inputs = batch(teacher_logp=None)
    if METHODS[name].needs_teacher:
        for function in (method_losses, token_weights):
            with pytest.raises(ValueError, match=f"{name} needs teacher_logp"):
                function(name, **inputs)
    else:
        assert_closed_form(name, **inputs)


def test_a_method_of_ones_own():
    def hinge(student_logp, teacher_logp, response_mask, *, beta, behaviour_logp):
        return (teacher_logp - student_logp).clamp(min=0.0)

    mine = Method("mine", "A + λ·[Δ > 0]", "Only where the skill says more", skills="self", term=hinge, coef=0.3)
    assert_closed_form(mine, **batch())
    closed = replace(mine, weight=lambda gap, *, beta, ratio: (gap > 0).to(gap))
    torch.testing.assert_close(token_weights(mine, **batch()), token_weights(closed, **batch()))


def test_an_advantage_shaping_of_ones_own():
    def soften(advantage, gap, *, coef):
        return (1 - coef) * advantage + coef * gap.tanh()

    mine = Method("soften", "(1 - w)·A + w·tanh(Δ)", "The skill takes part of the credit", shaping=soften, coef=0.5)
    assert_closed_form(mine, **batch())
    inputs = batch()
    no_skill = ~inputs["teacher_mask"]  # where no skill arrived the advantage stays, whatever the function does at 0
    assert torch.equal(token_weights(mine, **inputs)[no_skill], token_weights("grpo", **inputs)[no_skill])


def test_ablations_are_one_switch():
    inputs = batch()
    no_gate = replace(METHODS["seed"], term="plain")
    torch.testing.assert_close(token_weights(no_gate, **inputs), token_weights("grpo_opsd", **inputs))
    no_rl = replace(METHODS["seed"], policy_gradient=False)
    assert set(method_losses(no_rl, **inputs)) == {"distill"}
    assert_closed_form(no_rl, **inputs)
    torch.testing.assert_close(token_weights("seed", coef=0, **inputs), token_weights("grpo", **inputs))


def test_the_table_is_complete_and_frozen():
    needed = "grpo skill_grpo opsd grpo_opsd skill_sd rlsd sdar opid seed reverse_kl_sampled centred"
    assert set(needed.split()) == set(METHODS) == set(ONE_TOKEN)
    assert {m.term for m in METHODS.values()} >= set(KINDS)
    assert [m.name for m in METHODS.values() if m.skill_in_prompt] == ["skill_grpo"]
    assert all(m.source and m.formula and m.title for m in METHODS.values())
    with pytest.raises(FrozenInstanceError):
        METHODS["seed"].coef = 1.0  # pyright: ignore[reportAttributeAccessIssue]  (that it is refused is the test)


def test_the_result_carries_no_gradient():
    inputs = batch()
    inputs["student_logp"].requires_grad_()
    assert not token_weights("seed", **inputs).requires_grad


def test_resolve_replaces_only_what_is_given():
    assert resolve("seed") == METHODS["seed"]
    assert (resolve("seed", coef=0).coef, resolve("seed", coef=0).beta) == (0, 5.0)
    assert resolve(METHODS["sdar"], beta=1).beta == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "sead"}, "unknown method 'sead'; choose one of grpo, "),
        ({"coef": -0.1}, "coef must be finite and at least 0"),
        ({"coef": NAN}, "coef must be finite"),
        ({"beta": -1.0}, "beta must be finite and at least 0"),
        ({"teacher_logp": torch.zeros(4, 6)}, "teacher_logp has shape"),
        ({"teacher_mask": torch.ones(4, 7)}, "must be bool"),
        ({"teacher_mask": torch.ones(4, 6) > 0}, "response_mask has shape"),
        ({"response_mask": torch.ones(4, 7)}, "must be bool"),
        ({"advantage": torch.zeros(3)}, "advantages .* do not fit"),
        ({"behaviour_logp": torch.zeros(4, 6)}, "behaviour_logp has shape"),
    ],
)
def test_refusals(change, message):
    for function in (method_losses, token_weights):
        with pytest.raises(ValueError, match=message):  # unwrapped: the test run's type checker would answer first
            inspect.unwrap(function)(**({"method": "seed"} | batch() | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skills": "internet"}, 'skills must be "none", "library" or "self"'),
        ({"term": "gate"}, "unknown term 'gate'"),
        ({"shaping": "sqrt"}, "unknown shaping 'sqrt'"),
        ({"policy_gradient": False}, "nothing is trained"),
    ],
)
def test_a_row_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Method("mine", "?", "?", **change)


def test_the_example_in_the_module_runs():
    result = doctest.testmod(seedkit.methods)
    assert result.attempted > 0
    assert result.failed == 0
