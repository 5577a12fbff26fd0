"""Equally busy experts: the loss of transformers' Mixtral, and the moving bias of DeepSeek."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from clearhead.architecture.branches import Experts, FeedForward, Router
from clearhead.architecture.config import Head, ModelConfig
from clearhead.data.batch import IGNORED, Batch
from clearhead.data.datasets import Packed
from clearhead.data.tokens import Tokens
from clearhead.errors import ClearheadError
from clearhead.training.balance import BalanceBias, BalanceLoss, Routing, balance_loss
from clearhead.training.config import TrainConfig
from clearhead.training.objective import build_objective
from tests.model.toys import CONTEXT, WIDTH, decoder, grouped, some_tokens, stack, toy, translator


def mixture(**router):
    experts = Experts(
        num_experts=4,
        num_chosen=2,
        expert=FeedForward(width=8, activation="silu"),
        router=Router(**({"score": "softmax"} | router)),
    )
    decoder = stack(grouped(), feed_forward=experts)
    return toy(ModelConfig(width=WIDTH, context=CONTEXT, decoder=decoder, head=Head()), torch.float32).train()


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_mixtrals(masked):
    torch.manual_seed(0)
    logits = 2 * torch.randn(3 * 5, 4)
    mask = torch.arange(5)[None] < torch.tensor([[5], [2], [3]]) if masked else None
    scores = logits.softmax(-1)
    real = slice(None) if mask is None else mask.flatten()
    found = balance_loss(scores[real], scores.topk(2).indices[real])
    expected = load_balancing_loss_func((logits,), 4, 2, None if mask is None else mask.long())
    torch.testing.assert_close(found, expected)


def test_the_loss_is_least_at_balance():
    even = torch.full((4, 4), 0.25)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    assert balance_loss(even, chosen).item() == pytest.approx(2.0)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 4)
    assert balance_loss(skewed, torch.tensor([[0, 1]] * 4)).item() > 2.0


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_loss_reaches_the_routers(recomputed):
    """With activations recomputed too, where the router runs a second time."""
    grads = []
    for weight in (1e-9, 0.5):
        network = mixture()
        settings = TrainConfig(
            steps=1, batch_size=2, balance=BalanceLoss(weight=weight), checkpoint_activations=recomputed
        )
        objective = build_objective(network, settings, Routing(network, settings.balance))
        objective(Batch(tokens=some_tokens(), targets=some_tokens(seed=2))).total.backward()
        grads.append(network.decoder.layers[0].feed_forward.router.weight.grad)
    assert not torch.allclose(*grads)


def test_no_balance_loss_outside_training():
    network = mixture()
    config = TrainConfig(steps=1, batch_size=2, balance=BalanceLoss(weight=0.5))
    objective = build_objective(network, config, Routing(network, config.balance))
    batch = Batch(tokens=some_tokens(), targets=some_tokens(seed=2))
    assert objective.train()(batch).total > objective(batch).cross_entropy
    assert torch.equal(objective.eval()(batch).total, objective(batch).cross_entropy)


def test_the_bias_evens_out_the_load():
    network = mixture(score="sigmoid", selection_bias=True)
    router = network.decoder.layers[0].feed_forward.router
    with torch.no_grad():
        router.weight[0] += 0.8 * torch.randn(WIDTH)
    routing, tokens = Routing(network, BalanceBias()), some_tokens(16, 16)
    spread = []
    for _ in range(60):
        network(tokens)
        routing.count()
        spread.append(float(routing.loads[0].std()))
        routing.move_biases(0.02, lambda load: load)
    assert spread[-1] < 0.5 * spread[0]
    assert float(routing.loads[0].sum()) == 0


def test_the_bias_goes_up_for_idle_experts():
    network = mixture(score="sigmoid", selection_bias=True)
    routing = Routing(network, BalanceBias())
    routing.loads[0] = torch.tensor([9.0, 1.0, 5.0, 5.0])
    routing.move_biases(BalanceBias().speed, lambda load: load)
    bias = network.decoder.layers[0].feed_forward.router.selection_bias
    torch.testing.assert_close(bias, torch.tensor([-0.001, 0.001, 0.0, 0.0]))


def test_padding_is_no_load():
    network, settings = (
        mixture(score="sigmoid", selection_bias=True),
        TrainConfig(steps=1, batch_size=2, balance=BalanceBias(), checkpoint_activations=True),
    )
    routing = Routing(network, BalanceBias())
    mask = torch.arange(6)[None] < torch.tensor([[6], [2]])
    objective = build_objective(network, settings, routing)
    objective(Batch(tokens=some_tokens(2, 6), targets=some_tokens(2, 6, seed=2), mask=mask)).total.backward()
    assert [float(load.sum()) for load in routing.loads] == [8 * 2] * len(routing.loads)
    objective.eval()(Batch(tokens=some_tokens(2, 6), targets=some_tokens(2, 6, seed=2)))
    assert [float(load.sum()) for load in routing.loads] == [8 * 2] * len(routing.loads)


@pytest.mark.parametrize("balance", [BalanceLoss(weight=0.5), BalanceBias()])
def test_the_filler_of_packed_rows_is_no_load(balance):
    network = mixture(score="sigmoid", selection_bias=True)
    settings = TrainConfig(steps=1, batch_size=1, balance=balance)

    def told(context):
        """Documents of 5 and 3 tokens ask for 4 and 2: in 6 places they are alone."""
        rows, routing = Packed(Tokens.of([[1, 2, 3, 4, 5], [6, 7, 8]]), context), Routing(network, balance)
        batch = rows.batch(np.arange(1), np.zeros(1, np.uint64))
        assert batch.tokens.shape == (1, context)
        return build_objective(network, settings, routing)(batch).total, routing.loads[0]

    torch.testing.assert_close(told(10), told(6))


def test_nothing_to_balance_is_said():
    with pytest.raises(ClearheadError, match=r"no experts to balance"):
        Routing(toy(decoder()), BalanceLoss())
    with pytest.raises(ClearheadError, match="selection_bias"):
        Routing(mixture(), BalanceBias())


def test_each_stack_of_a_translator_leaves_its_own_padding_out():
    experts, config = mixture().config.decoder.layers[0].feed_forward, translator()
    with_experts = {
        name: replace(part, layers=tuple(replace(layer, feed_forward=experts) for layer in part.layers))
        for name, part in (("encoder", config.encoder), ("decoder", config.decoder))
    }
    network = toy(replace(config, **with_experts), torch.float32).train()
    settings = TrainConfig(steps=1, batch_size=2, balance=BalanceLoss(weight=0.5))

    def loss_of(num_sources, num_targets, **masks):
        source, target = some_tokens(1, 7)[:, :num_sources], some_tokens(1, 6, seed=2)[:, :num_targets]
        asked = target.clone()
        asked[:, 3:] = IGNORED
        objective = build_objective(network, settings, Routing(network, settings.balance))
        return objective(Batch(tokens=target, targets=asked, source=source, **masks)).total

    real = {"source_mask": torch.arange(7)[None] < 5, "mask": torch.arange(6)[None] < 3}
    torch.testing.assert_close(loss_of(7, 6, **real), loss_of(5, 3))
