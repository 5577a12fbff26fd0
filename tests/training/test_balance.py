"""Test balancing experts by the loss of Mixtral in transformers, and by the bias of DeepSeek."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from clearhead.architecture import Experts, FeedForward, Head, ModelConfig, Router
from clearhead.data.batch import IGNORED, Batch
from clearhead.data.datasets import Packed
from clearhead.data.tokens import Tokens
from clearhead.errors import ClearheadError
from clearhead.training.balance import BalanceBias, BalanceLoss, RoutingMonitor, balance_loss
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
def test_balance_loss_equals_that_of_mixtral_in_transformers(masked):
    torch.manual_seed(0)
    logits = 2 * torch.randn(3 * 5, 4)
    mask = torch.arange(5)[None] < torch.tensor([[5], [2], [3]]) if masked else None
    scores = logits.softmax(-1)
    selected = slice(None) if mask is None else mask.flatten()
    loss = balance_loss(scores[selected], scores.topk(2).indices[selected])
    expected = load_balancing_loss_func((logits,), 4, 2, None if mask is None else mask.long())
    torch.testing.assert_close(loss, expected)


def test_balance_loss_is_lowest_at_perfect_balance():
    even = torch.full((4, 4), 0.25)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    assert balance_loss(even, chosen).item() == pytest.approx(2.0)
    skewed = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 4)
    assert balance_loss(skewed, torch.tensor([[0, 1]] * 4)).item() > 2.0


@pytest.mark.parametrize("recomputed", [False, True])
def test_balance_loss_changes_the_gradient_of_the_routers(recomputed):
    """With recomputed activations, the router runs a second time in the backward pass."""
    gradients = []
    for weight in (1e-9, 0.5):
        network = mixture()
        settings = TrainConfig(
            steps=1, batch_size=2, balance=BalanceLoss(weight=weight), checkpoint_activations=recomputed
        )
        objective = build_objective(network, settings, RoutingMonitor(network, settings.balance))
        objective(Batch(tokens=some_tokens(), targets=some_tokens(seed=2))).total.backward()
        gradients.append(network.decoder.layers[0].feed_forward.router.weight.grad)
    assert not torch.allclose(*gradients)


def test_balance_loss_applies_in_training_only():
    network = mixture()
    config = TrainConfig(steps=1, batch_size=2, balance=BalanceLoss(weight=0.5))
    objective = build_objective(network, config, RoutingMonitor(network, config.balance))
    batch = Batch(tokens=some_tokens(), targets=some_tokens(seed=2))
    assert objective.train()(batch).total > objective(batch).cross_entropy
    assert torch.equal(objective.eval()(batch).total, objective(batch).cross_entropy)


def test_balance_bias_evens_out_the_load():
    network = mixture(score="sigmoid", selection_bias=True)
    router = network.decoder.layers[0].feed_forward.router
    with torch.no_grad():
        router.weight[0] += 0.8 * torch.randn(WIDTH)
    monitor, tokens = RoutingMonitor(network, BalanceBias()), some_tokens(16, 16)
    spreads = []
    for _ in range(60):
        network(tokens)
        monitor.count_loads()
        spreads.append(float(monitor.loads[0].std()))
        monitor.update_biases(0.02, lambda load: load)
    assert spreads[-1] < 0.5 * spreads[0]
    assert float(monitor.loads[0].sum()) == 0


def test_update_biases_raises_the_bias_of_experts_below_the_mean_load():
    network = mixture(score="sigmoid", selection_bias=True)
    monitor = RoutingMonitor(network, BalanceBias())
    monitor.loads[0] = torch.tensor([9.0, 1.0, 5.0, 5.0])
    monitor.update_biases(BalanceBias().speed, lambda load: load)
    bias = network.decoder.layers[0].feed_forward.router.selection_bias
    torch.testing.assert_close(bias, torch.tensor([-0.001, 0.001, 0.0, 0.0]))


def test_padding_and_validation_do_not_count_as_load():
    network, settings = (
        mixture(score="sigmoid", selection_bias=True),
        TrainConfig(steps=1, batch_size=2, balance=BalanceBias(), checkpoint_activations=True),
    )
    monitor = RoutingMonitor(network, BalanceBias())
    mask = torch.arange(6)[None] < torch.tensor([[6], [2]])
    objective = build_objective(network, settings, monitor)
    objective(Batch(tokens=some_tokens(2, 6), targets=some_tokens(2, 6, seed=2), mask=mask)).total.backward()
    assert [float(load.sum()) for load in monitor.loads] == [8 * 2] * len(monitor.loads)
    objective.eval()(Batch(tokens=some_tokens(2, 6), targets=some_tokens(2, 6, seed=2)))
    assert [float(load.sum()) for load in monitor.loads] == [8 * 2] * len(monitor.loads)


@pytest.mark.parametrize("balance", [BalanceLoss(weight=0.5), BalanceBias()])
def test_the_filler_of_packed_rows_does_not_count_as_load(balance):
    network = mixture(score="sigmoid", selection_bias=True)
    settings = TrainConfig(steps=1, batch_size=1, balance=balance)

    def loss_and_loads(context):
        """Documents of 5 and 3 tokens have 4 and 2 targets, so a row of 6 has no filler."""
        tokens, monitor = Tokens.from_documents([[1, 2, 3, 4, 5], [6, 7, 8]]), RoutingMonitor(network, balance)
        batch = Packed(tokens, context).batch(np.arange(1), np.zeros(1, np.uint64))
        assert batch.tokens.shape == (1, context)
        return build_objective(network, settings, monitor)(batch).total, monitor.loads[0]

    torch.testing.assert_close(loss_and_loads(10), loss_and_loads(6))


def test_a_network_that_cannot_be_balanced_is_rejected():
    with pytest.raises(ClearheadError, match=r"no experts to balance"):
        RoutingMonitor(toy(decoder()), BalanceLoss())
    with pytest.raises(ClearheadError, match="selection_bias"):
        RoutingMonitor(mixture(), BalanceBias())


def test_encoder_and_decoder_each_exclude_their_own_padding():
    experts, config = mixture().config.decoder.layers[0].feed_forward, translator()
    with_experts = {
        name: replace(part, layers=tuple(replace(layer, feed_forward=experts) for layer in part.layers))
        for name, part in (("encoder", config.encoder), ("decoder", config.decoder))
    }
    network = toy(replace(config, **with_experts), torch.float32).train()
    settings = TrainConfig(steps=1, batch_size=2, balance=BalanceLoss(weight=0.5))

    def total_loss(num_sources, num_targets, **masks):
        source, target = some_tokens(1, 7)[:, :num_sources], some_tokens(1, 6, seed=2)[:, :num_targets]
        labels = target.clone()
        labels[:, 3:] = IGNORED
        objective = build_objective(network, settings, RoutingMonitor(network, settings.balance))
        return objective(Batch(tokens=target, targets=labels, source=source, **masks)).total

    masks = {"source_mask": torch.arange(7)[None] < 5, "mask": torch.arange(6)[None] < 3}
    torch.testing.assert_close(total_loss(7, 6, **masks), total_loss(5, 3))
