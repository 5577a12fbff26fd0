"""Mixture of experts against a dense sum over all experts with explicit weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from clearhead.architecture import ExpertGroups, Experts, FeedForward, Router
from clearhead.model.mixture import MixtureLayer, keep_best_groups
from tests.model.toys import assert_close, redraw

WIDTH = 10
EXPERT = FeedForward(width=6, activation="gelu", gated=True)
BASE = Experts(num_experts=8, num_chosen=3, expert=EXPERT, router=Router(score="softmax"))
DEEPSEEK_GROUPS = ExpertGroups(num_groups=4, num_kept=2, scored_by="top2_sum")
CASES = {
    "softmax": BASE,
    "sigmoid": replace(BASE, router=Router(score="sigmoid")),
    "ungated": replace(BASE, expert=FeedForward(width=6, activation="relu")),
    "one": replace(BASE, num_chosen=1),
    "all": replace(BASE, num_chosen=8),
    "renormalized": replace(BASE, router=Router(score="softmax", renormalize_epsilon=1e-20)),
    "scaled": replace(BASE, router=Router(score="sigmoid", renormalize_epsilon=0.1, scale=2.5)),
    "softcap": replace(BASE, router=Router(score="softmax", softcap=0.5)),
    "groups by max": replace(BASE, router=Router(score="softmax", groups=replace(DEEPSEEK_GROUPS, scored_by="max"))),
    "groups by two": replace(BASE, router=Router(score="sigmoid", groups=DEEPSEEK_GROUPS, selection_bias=True)),
    "selection bias": replace(BASE, router=Router(score="sigmoid", selection_bias=True)),
    "weighed input": replace(BASE, num_chosen=2, router=Router(score="sigmoid", weighs="input")),
    "shared": replace(BASE, shared=FeedForward(width=7, activation="silu", gated=True, bias=True)),
    "divided": replace(BASE, shared=EXPERT, divisor=2**0.5),
}


def mixture(config: Experts) -> MixtureLayer:
    """Return a mixture with random weights in float64."""
    module = MixtureLayer(config, WIDTH)
    redraw(module)
    if module.router.selection_bias is not None:
        module.router.selection_bias.copy_(torch.randn(8, generator=torch.Generator().manual_seed(1)))
    return module.double()


def inputs(num_tokens: int = 12) -> Tensor:
    return torch.randn(2, num_tokens, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


ACTIVATION = {"gelu": functional.gelu, "relu": functional.relu, "silu": functional.silu}


def run_expert(module: MixtureLayer, number: int, x: Tensor) -> Tensor:
    """Return the output of one expert, computed by hand."""
    act = ACTIVATION[module.config.expert.activation]
    if module.gate is None:
        hidden = act(x @ module.up[number].T)
    else:
        hidden = act(x @ module.gate[number].T) * (x @ module.up[number].T)
    return hidden @ module.down[number].T


def explicit_weights(module: MixtureLayer, x: Tensor) -> dict[int, float]:
    """Return the weights of one token (D,) by expert, computed with sorted lists."""
    config, router = module.config, module.config.router
    z = module.router.weight @ x
    if router.softcap is not None:
        z = router.softcap * torch.tanh(z / router.softcap)
    p = (z.exp() / z.exp().sum() if router.score == "softmax" else 1 / (1 + (-z).exp())).tolist()
    bias = [0.0] * len(p) if module.router.selection_bias is None else module.router.selection_bias.tolist()
    rank = [score + extra for score, extra in zip(p, bias, strict=True)]
    candidates = list(range(len(p)))
    if router.groups is not None:
        size, counted = len(p) // router.groups.num_groups, 1 if router.groups.scored_by == "max" else 2
        groups = [candidates[start : start + size] for start in range(0, len(p), size)]
        groups.sort(key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[:counted]))
        candidates = [e for group in groups[: router.groups.num_kept] for e in group]
    chosen = sorted(candidates, key=lambda e: -rank[e])[: config.num_chosen]
    total = 1.0
    if router.renormalize_epsilon is not None:
        total = sum(p[e] for e in chosen) + router.renormalize_epsilon
    return {e: p[e] / total * router.scale for e in chosen}


def dense_sum(module: MixtureLayer, x: Tensor) -> Tensor:
    """Run every expert for every token, most of them with weight 0."""
    config, rows = module.config, []
    for token in x.flatten(0, 1):
        weights, row = explicit_weights(module, token), torch.zeros(WIDTH, dtype=torch.float64)
        for number in range(config.num_experts):
            weight = weights.get(number, 0.0)
            if config.router.weighs == "input":
                row = row + run_expert(module, number, weight * token)
            else:
                row = row + weight * run_expert(module, number, token)
        if module.shared is not None:
            row = row + module.shared(token)
        rows.append(row / config.divisor)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", CASES)
def test_a_mixture_equals_the_dense_sum_over_all_experts(name):
    module, x = mixture(CASES[name]), inputs()
    found, expected = module(x), dense_sum(module, x)
    assert expected.abs().max() > 0.05
    assert_close(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_independent_of_each_other(name):
    """No token is dropped, however many choose the same expert."""
    module, x = mixture(CASES[name]), inputs()
    assert_close(module(x), torch.cat([module(token) for token in x.split(1, dim=1)], dim=1))
    repeated = x[:, :1].expand(2, 40, WIDTH)
    assert_close(module(repeated), module(x[:, :1]).expand(2, 40, WIDTH))


@pytest.mark.parametrize("name", CASES)
def test_autocast_is_close_to_full_precision(name):
    module, x = mixture(CASES[name]).float(), inputs().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(x)
    assert found.shape == x.shape
    assert ((found - module(x)).norm(dim=-1) / module(x).norm(dim=-1)).median() < 0.05


def test_selection_bias_affects_the_choice_but_not_the_weights():
    module, x = mixture(CASES["selection bias"]), inputs()
    with torch.no_grad():
        module.router.selection_bias.copy_(torch.tensor([0, 0, 0, 0, 0, 9, 9, 9]))
    weights, chosen = module.router(x.flatten(0, 1))
    assert (chosen.sort(dim=-1).values == torch.tensor([5, 6, 7])).all()
    scores = (x.flatten(0, 1) @ module.router.weight.T).sigmoid()
    assert_close(weights, scores.gather(1, chosen))
    assert "selection_bias" in dict(module.router.named_buffers())
    assert "selection_bias" not in dict(module.router.named_parameters())


def test_keep_best_groups_excludes_all_other_groups():
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.2, 0.8, 0.15]])
    by_max = keep_best_groups(scores, ExpertGroups(num_groups=4, num_kept=2, scored_by="max"))
    by_two = keep_best_groups(scores, ExpertGroups(num_groups=4, num_kept=2, scored_by="top2_sum"))
    assert by_max.isfinite().nonzero()[:, 1].tolist() == [0, 1, 6, 7]
    assert by_two.isfinite().nonzero()[:, 1].tolist() == [2, 3, 6, 7]
    assert torch.equal(by_max[by_max.isfinite()], scores[0, [0, 1, 6, 7]])


@pytest.mark.parametrize("name", ["softmax", "renormalized", "groups by max"])
def test_ties_still_choose_distinct_experts(name):
    """A router with zero weights gives all experts the same score."""
    module = mixture(CASES[name])
    with torch.no_grad():
        module.router.weight.zero_()
    weights, chosen = module.router(inputs().flatten(0, 1))
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    expected = 1 / 3 if name == "renormalized" else 1 / 8
    assert_close(weights, torch.full_like(weights, expected))
    assert torch.equal(module(inputs()), module(inputs()))


def test_a_mixture_of_equal_experts_equals_one_expert():
    """This holds with renormalized weights."""
    module = mixture(CASES["renormalized"])
    with torch.no_grad():
        for part in (module.gate, module.up, module.down):
            part.copy_(part[:1].expand_as(part).clone())
    assert_close(module(inputs()), run_expert(module, 0, inputs()))


def test_gradients_reach_the_router_and_every_chosen_expert():
    module, x = mixture(CASES["shared"]), inputs(40)
    _, chosen = module.router(x.flatten(0, 1))
    module(x).square().sum().backward()
    assert module.router.weight.grad.abs().min() > 0
    for number in range(8):
        is_chosen = bool((chosen == number).any())
        assert module.up.grad[number].abs().max().item() > 0 if is_chosen else not module.up.grad[number].any()
    assert all(parameter.grad.abs().max() > 0 for parameter in module.shared.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models_route_in_float32(dtype):
    module, x = mixture(BASE).to(dtype), inputs().to(dtype)
    weights, chosen = module.router(x.flatten(0, 1))
    assert weights.dtype == torch.float32
    scores = (x.flatten(0, 1).float() @ module.router.weight.float().T).softmax(dim=-1)
    assert torch.equal(chosen.sort().values, scores.topk(3).indices.sort().values)
    assert module(x).dtype == dtype
