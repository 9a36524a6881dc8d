"""The table of methods: closed form against autograd for every row, row 11, one token by hand, your own method."""

import doctest
import inspect
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

import seedkit.methods
from seedkit.gate import COMBINATIONS, KINDS, combine_teachers, reverse_kl_full
from seedkit.methods import METHODS, Method, NoClosedForm, method_losses, resolve, reverse_kl_top20, token_weights

NAN = float("nan")
WHOLE = [name for name, method in METHODS.items() if method.whole]
SAMPLED = [name for name in METHODS if name not in WHOLE]


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


def dists(mask) -> dict[str, Any]:
    """Random distributions over 30 tokens, NaN wherever nothing may be read."""
    random, shape = torch.Generator().manual_seed(1), (*mask.shape, 30)
    p, q = (torch.log_softmax(torch.randn(shape, generator=random, dtype=torch.float64), -1) for _ in range(2))
    p[~mask], q[~mask] = NAN, NAN
    return {"student_dist": p, "teacher_dist": q}


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
@pytest.mark.parametrize("name", SAMPLED)
def test_closed_form_equals_autograd(name, on_policy):
    inputs = batch()
    if on_policy:
        inputs["behaviour_logp"] = None
    for coef in (None, 0.7):  # the papers' λ is small enough to hide a wrong term
        assert_closed_form(name, coef=coef, **inputs)
    inputs["advantage"] = inputs["advantage"].unsqueeze(-1) * torch.linspace(-1, 1, 7, dtype=torch.float64)
    assert_closed_form(name, coef=0.7, beta=1.3, **inputs)
    inputs["step_mask"] = torch.arange(7).expand(4, 7) % 3 == 0  # three of seven tokens are a step skill's
    assert_closed_form(name, coef=0.7, **inputs)
    if METHODS[name].step_scale is not None:
        scaled = replace(METHODS[name], coef=0.7, step_scale=0.3)
        assert_closed_form(scaled, **inputs)
        assert not torch.equal(token_weights(scaled, **inputs), token_weights(name, coef=0.7, **inputs))


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
    "several": (1.00924142, 1.00075858),  # as SEED; `combine_teachers` has the numbers for more than one skill
}


@pytest.mark.parametrize("name", SAMPLED)
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


@pytest.mark.parametrize("name", SAMPLED)
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
    losses = method_losses(name, **inputs, **dists(inputs["response_mask"] & inputs["teacher_mask"]))
    method = METHODS[name]
    expected = {"policy": method.policy_gradient, "distill": method.term is not None}
    assert set(losses) == {key for key, present in expected.items() if present}
    for loss in losses.values():
        assert loss.shape == (4, 7)
        assert torch.isfinite(loss).all()
        assert loss[~inputs["response_mask"]].abs().sum() == 0
    if "distill" in losses:
        assert losses["distill"][~inputs["teacher_mask"]].abs().sum() == 0


@pytest.mark.parametrize("name", SAMPLED)
def test_a_teacher_is_asked_for_where_one_is_needed(name):
    inputs = batch(teacher_logp=None)
    if METHODS[name].needs_teacher:
        for function in (method_losses, token_weights):
            with pytest.raises(ValueError, match=f"{name} needs teacher_logp"):
                function(name, **inputs)
    else:
        assert_closed_form(name, **inputs)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_distributions(name):
    inputs = batch(teacher_logp=None)
    mask = inputs["response_mask"] & inputs["teacher_mask"]
    given = dists(mask)
    p = given["student_dist"].requires_grad_()
    losses = method_losses(name, coef=0.7, **inputs, **given)
    clean = {key: torch.where(mask[..., None], value, 0.0).detach() for key, value in given.items()}
    expected = 0.7 * METHODS[name].term(**clean, response_mask=mask)  # pyright: ignore[reportCallIssue, reportOptionalCall]
    torch.testing.assert_close(losses["distill"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(losses["policy"], method_losses("grpo", **inputs)["policy"], rtol=0, atol=0)
    losses["distill"].sum().backward()
    assert p.grad is not None and p.grad[mask].abs().sum() > 0 and p.grad[~mask].abs().sum() == 0


@pytest.mark.parametrize("name", WHOLE)
def test_why_there_is_no_weight_a_token(name):
    assert METHODS[name].no_closed_form
    with pytest.raises(NoClosedForm, match=f"{name} has no weight a sampled token: its gradient falls on .* whole"):
        token_weights(name, **batch())
    with pytest.raises(ValueError, match=f"{name} needs student_dist and teacher_dist"):
        method_losses(name, **batch())
    assert not any(METHODS[other].no_closed_form for other in SAMPLED)


def test_a_term_on_whole_distributions_of_ones_own_never_sees_masked_nan():
    def variance(student_dist, teacher_dist, response_mask):
        return (student_dist - teacher_dist).var(-1)

    mine = Method("mine", "?", "Even log-ratios", skills="self", term=variance, whole=True, coef=0.3)
    inputs = batch()
    mask = inputs["response_mask"] & inputs["teacher_mask"]
    given = dists(mask)
    p = given["student_dist"].requires_grad_()
    method_losses(mine, **inputs, **given)["distill"].sum().backward()
    assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad[~mask].abs().sum() == 0


def test_the_topk_row_keeps_twenty_tokens():
    mask = torch.ones(4, 7) > 0
    given = dists(mask)
    torch.testing.assert_close(
        reverse_kl_top20(**given, response_mask=mask), reverse_kl_full(**given, response_mask=mask, top_k=20)
    )
    assert METHODS["reverse_kl_topk"].term is reverse_kl_top20


def test_opid_weighs_step_skills_apart():
    # A = 1, w = .1, Δ = .5 and -.5; the second token's skill is a step skill of half the weight: 1 + .05, 1 - .025
    s = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    weights = token_weights(
        replace(METHODS["opid"], coef=0.1, step_scale=0.5),
        advantage=torch.ones(1, dtype=torch.float64),
        student_logp=s,
        teacher_logp=torch.tensor([[-0.5, -1.5]], dtype=torch.float64),
        response_mask=s < 0,
        step_mask=torch.tensor([[False, True]]),
    )
    torch.testing.assert_close(weights, torch.tensor([[1.05, 0.975]], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", COMBINATIONS)
def test_several_teachers_keep_the_closed_form(how):
    inputs = batch()
    k = torch.stack([inputs["teacher_logp"], inputs["teacher_logp"].flip(0)])  # NaN in other places
    arrived = ~k.isnan() & inputs["response_mask"]
    combined, some = combine_teachers(inputs["student_logp"], k, arrived, how=how)
    inputs |= {"teacher_logp": combined, "teacher_mask": some}
    assert_closed_form("several", coef=0.7, **inputs)
    # One token, A = 1, s = -1; Δ = .5 and .2: σ(2.5) = .924142, σ(1) = .731059, of the mean σ(1.75) = .851953
    s = torch.tensor([[-1.0]], dtype=torch.float64)
    one, _ = combine_teachers(s, torch.stack([s + 0.5, s + 0.2]), torch.ones(2, 1, 1) > 0, how=how)
    ones = torch.ones(1, dtype=torch.float64)
    weights = token_weights(
        "several", advantage=ones, student_logp=s, teacher_logp=one, response_mask=s < 0, coef=0.1
    )
    expected = {"mean": 1.0851953, "max": 1.0924142, "agreement": 1.0731059}[how]
    torch.testing.assert_close(weights, torch.tensor([[expected]], dtype=torch.float64), rtol=0, atol=1e-6)


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
    needed = "grpo skill_grpo opsd grpo_opsd skill_sd rlsd sdar opid seed reverse_kl_sampled centred several"
    assert needed.split() == SAMPLED == list(ONE_TOKEN)
    assert WHOLE == ["reverse_kl_full", "reverse_kl_topk", "forward_kl_full", "js_full"]
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
        ({"method": "opid", "step_mask": torch.ones(4, 7)}, "must be bool"),
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
        ({"skills": "internet"}, 'skills must be "none", "library", "self" or "both"'),
        ({"term": "gate"}, "unknown term 'gate'"),
        ({"shaping": "sqrt"}, "unknown shaping 'sqrt'"),
        ({"policy_gradient": False}, "nothing is trained"),
        ({"whole": True, "term": "gated"}, "whole distributions must be a function"),
        ({"step_scale": 1.0}, "shaping is None"),
        ({"shaping": "opid", "step_scale": -1.0}, "step_scale must be finite and at least 0, got -1.0"),
        ({"combine": "vote"}, "unknown combine 'vote'; choose one of mean, max, agreement"),
        ({"teacher_decay": 1.5}, "teacher_decay must be finite and between 0 and 1, got 1.5"),
        ({"teacher_decay": NAN}, "teacher_decay must be finite"),
        ({"term": "gated", "fade": 0}, "fade must be a number of updates, at least 1, got 0"),
        ({"term": "gated", "fade": True}, "fade must be a number of updates, at least 1, got True"),
        ({"fade": 5}, "fade needs a term or shaping"),
        ({"term": "gated", "policy_gradient": False, "fade": 5}, "the GRPO term that stays"),
    ],
)
def test_a_row_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Method("mine", "?", "?", **change)


def test_a_coefficient_that_fades():
    rlsd = METHODS["rlsd"]  # μ = 0.5 falls to 0 in 50 updates, as ZJU-REAL/SDAR (a223108) has it
    assert [rlsd.at(update).coef for update in (1, 25, 49, 50, 60)] == pytest.approx([0.49, 0.25, 0.01, 0, 0])
    assert rlsd.at(49).needs_teacher and not rlsd.at(50).needs_teacher
    assert METHODS["seed"].at(1000) is METHODS["seed"]
    gap, advantage = torch.full((1, 3), 0.1), torch.tensor([0.7])
    known: dict[str, Any] = {
        "advantage": advantage,
        "student_logp": gap - 1,
        "response_mask": torch.ones(1, 3, dtype=torch.bool),
    }
    faded = replace(METHODS["reverse_kl_full"], fade=4).at(4)
    assert torch.equal(token_weights(faded, **known), token_weights("grpo", **known))


def test_the_example_in_the_module_runs():
    result = doctest.testmod(seedkit.methods)
    assert result.attempted > 0
    assert result.failed == 0
