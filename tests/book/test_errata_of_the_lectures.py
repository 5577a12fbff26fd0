"""Errata 11 to 18 of the book: each test shows the correct statement, and that our code follows it."""

import math
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from clearhead.architecture import Dropout, GroupedAttention, SinusoidalPositions
from clearhead.cache import KeyValueCache
from clearhead.families import preset
from clearhead.model import Transformer
from clearhead.model.attend import Scoring, attention_steps, fused_attention, reference_attention
from clearhead.model.attention import Attention
from clearhead.model.masks import Mask
from clearhead.model.positions import sinusoids
from tests.book.golden import golden
from tests.model.toys import (
    RecordingKernel,
    assert_close,
    attention_context,
    decoder,
    redraw,
    some_tokens,
    toy,
    translator,
)


def test_erratum_11_the_largest_weight_of_heatmap_b_is_0_9996():
    """Printed: 0.9997."""
    row = golden("heatmaps", "matrices", "B")[:1, None, None]
    unit = torch.eye(4, dtype=torch.float64)[None, None]
    weight = attention_steps(row, unit, unit, Scoring(mask=Mask(), scale=1.0)).weights[0, 0, 0, 0].item()
    assert math.isclose(weight, math.exp(10) / (math.exp(10) + 3 * math.e), rel_tol=1e-12)
    assert round(weight, 4) == 0.9996


def test_erratum_12_the_output_projection_costs_as_many_products_as_there_are_tokens():
    """Printed: hd², without the length M. The output projection multiplies the h·(d/h) outputs of each of M tokens."""
    width = 16
    attention = Attention(GroupedAttention(num_heads=4, num_kv_heads=4, head_width=4), width)
    flops = []
    for length in (3, 12):
        with FlopCounterMode(display=False) as counter:
            attention.output(torch.zeros(1, length, width))
        flops.append(counter.get_total_flops())
    assert flops == [2 * 3 * width * width, 2 * 12 * width * width]


def test_erratum_13_scores_are_multiplied_by_one_over_the_root_of_d():
    """Printed: "divide by 1/√head_size", which would make the variance d² instead of 1."""
    width = 64
    q, k = torch.randn(2, 1, 1, 400, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    scoring = attention_scoring(width)
    assert scoring.scale == 1 / math.sqrt(width)
    scores = attention_steps(q, k, k, scoring).scores
    assert 0.9 < scores.var() < 1.1
    assert (q @ k.mT / (1 / math.sqrt(width))).var() > 0.9 * width**2


def attention_scoring(width: int) -> Scoring:
    """Return the scoring that a layer with heads of this width passes to its kernel."""
    kernel = RecordingKernel()
    attention = Attention(GroupedAttention(num_heads=1, num_kv_heads=1, head_width=width), width)
    attention(torch.zeros(1, 2, width), attention_context(Mask(), kernel, 2))
    return kernel.scorings[0]


def test_erratum_14_the_newest_key_is_that_of_the_last_token():
    """Printed: W_k x[:, :, -1], the last entry of every token; right is x[:, -1, :] W_k."""
    network, tokens, kernel = toy(decoder()), some_tokens(2, 5), RecordingKernel()
    cache = KeyValueCache(network.config)
    inputs = []
    network.decoder.layers[0].attention.key.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    with torch.no_grad():
        for column in tokens.split(1, dim=1):
            network(column, kernel=kernel, cache=cache)
            cache.advance()
        network(tokens)
    whole = inputs[-1]  # (B, T, D), the input of the keys in one pass
    key = network.decoder.layers[0].attention.key
    newest = kernel.keys[-len(network.decoder.layers)][:, :, -1].flatten(1)  # (B, K·H), of the first layer
    assert_close(newest, key(whole[:, -1, :]))
    assert whole[:, :, -1].shape != whole[:, -1, :].shape


def test_erratum_15_the_exponents_of_the_sinusoids_start_at_0():
    """Printed: from 2·1/d to 1. Then no entry would be sin t."""
    table = sinusoids(torch.arange(6), 8, SinusoidalPositions(), torch.float64)
    angles = torch.arange(6, dtype=torch.float64)
    assert_close(table[:, 0], angles.sin())
    assert_close(table[:, 6], (angles * 10000 ** (-6 / 8)).sin())  # the last pair: 2·3/8, less than 1


def test_erratum_16_the_weights_of_one_decoded_token_are_one_row():
    """Printed: b × n × 1; right is b × 1 × n for each head."""
    network, kernel, cache = toy(decoder()), RecordingKernel(), None
    cache = KeyValueCache(network.config)
    with torch.no_grad():
        for column in some_tokens(2, 5).split(1, dim=1):
            network(column, kernel=kernel, cache=cache)
            cache.advance()
    batch, _, num_queries, num_keys = kernel.steps[-1].weights.shape
    assert (batch, num_queries, num_keys) == (2, 1, 5)


def test_erratum_17_the_decoder_of_an_encoder_decoder_is_trained_like_a_decoder_only_model():
    """Printed: "as before for encoder-only models". Its loss needs the causal mask: no logit sees a later target."""
    network, source, target = toy(translator()), some_tokens(2, 6), some_tokens(2, 5)
    changed = target.clone()
    changed[:, 3] = (changed[:, 3] + 1) % network.config.vocab_size
    for kernel in (reference_attention, fused_attention):
        before, after = (network(source, each, kernel=kernel) for each in (target, changed))
        assert_close(after[:, :3], before[:, :3])
        assert (after[:, 3:] - before[:, 3:]).abs().max() > 1e-3


def test_erratum_18_the_dropout_of_attention_is_a_setting_of_its_own():
    """The code of the lecture passes its dropout everywhere but to attention, which has a default of the same size."""
    assert preset("annotated-transformer").dropout == Dropout(
        embedding=0.1, residual=0.1, attention=0.1, activation=0.1
    )
    tokens = some_tokens()
    for dropout, is_random in ((Dropout(), False), (Dropout(attention=0.5), True)):
        network = Transformer(replace(decoder(), dropout=dropout)).train()
        redraw(network)
        assert torch.equal(network(tokens), network(tokens)) != is_random
