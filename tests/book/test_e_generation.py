"""Book E1 to E4 and erratum 10: generation token by token, with and without a cache."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead.architecture import Causal, FeedForward
from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.families import preset
from clearhead.generation import TokenSequence, decode
from clearhead.generation.plain import decode_plainly
from clearhead.model.attend import attention_steps, fused_attention
from clearhead.model.attention import Attention
from clearhead.model.context import AttentionContext
from clearhead.model.masks import Mask, make_mask
from clearhead.model.transformer import Transformer
from clearhead.options import SamplingOptions
from tests.book.golden import golden
from tests.model.toys import decoder, grouped, toy
from tests.toy_presets import shrink


def count_key_projections(network, run):
    """Return the number of tokens that pass through the key projection of the first layer while `run` runs."""
    counted = []
    hook = network.decoder.layers[0].attention.key.register_forward_hook(
        lambda module, inputs, output: counted.append(inputs[0].shape[1])
    )
    run()
    hook.remove()
    return sum(counted)


@pytest.mark.parametrize("number", [1, 4, 16, 100])
def test_e2_the_number_of_key_projections_with_and_without_a_cache(number):
    """It is N(N+1)/2 without a cache and N with one."""
    network = toy(decoder())
    options = SamplingOptions(max_new_tokens=number)
    index = golden("projections", "N").tolist().index(number)
    uncached = count_key_projections(network, lambda: list(decode_plainly(network, [1], options)))
    rows = [TokenSequence([1], options)]
    cached = count_key_projections(network, lambda: list(decode(network, rows)))
    assert uncached == golden("projections", "without_cache")[index]
    assert cached == golden("projections", "with_cache")[index]


def test_erratum_10_a_cache_reduces_projections_and_scores():
    """Projections decrease from N² to N, the scores that attention computes from N³ to N²."""
    network = toy(decoder())

    def count_scores(run):
        counted = []

        def counting_kernel(q, k, v, scoring):
            counted.append(q.shape[2] * k.shape[2])
            return attention_steps(q, k, v, scoring).output

        run(counting_kernel)
        return sum(counted) // len(network.decoder.layers)

    def uncached(kernel):
        for length in range(1, 13):
            network(torch.zeros(1, length, dtype=torch.long), kernel=kernel)

    def cached(kernel):
        cache = KeyValueCache(network.config)
        for _ in range(12):
            network(torch.zeros(1, 1, dtype=torch.long), kernel=kernel, cache=cache)
            cache.advance()

    with torch.no_grad():
        assert count_scores(uncached) == sum(length**2 for length in range(1, 13))
        assert count_scores(cached) == sum(range(1, 13))


def test_e2_the_worked_example_token_by_token():
    """Every key, value and output equals the worked example's, in one pass and with a cache."""
    attention = Attention(grouped(num_heads=1, num_kv_heads=1, head_width=2, input_bias=False), width=2).double()
    for projection, name in ((attention.query, "W_q"), (attention.key, "W_k"), (attention.value, "W_v")):
        projection.weight = nn.Parameter(golden("kv_cache", name).T.contiguous())
    attention.output.weight = nn.Parameter(torch.eye(2, dtype=torch.float64))
    config = decoder(num_heads=1, num_kv_heads=1, head_width=2)
    cache = KeyValueCache(config)
    x = golden("kv_cache", "x")[None]
    output = attention(x, AttentionContext(Mask(causal=True), fused_attention, torch.arange(3)[None]))
    assert (output[0] - golden("kv_cache", "causal_scaled_output")).abs().max() <= 1e-12
    for step in range(3):
        cache.prepare(torch.zeros(1, 1, dtype=torch.long))
        indices = cache.attention_indices(Causal())
        context = AttentionContext(make_mask(Causal(), indices), fused_attention, indices.query_index)
        context = replace(context, write_cache=lambda key, value: cache.write(0, key, value))
        step_output = attention(x[:, step : step + 1], context)
        cache.advance()
        assert (step_output[0, 0] - golden("kv_cache", "causal_scaled_output")[step]).abs().max() <= 1e-12
    assert torch.equal(cache.stores[0].key[0, 0, :3], golden("kv_cache", "k"))
    assert torch.equal(cache.stores[0].value[0, 0, :3], golden("kv_cache", "v"))


@pytest.mark.parametrize(
    ("name", "numbers_per_token"),
    [
        ("gpt2", 2 * 768 * 12),  # 2·d·L (004)
        ("llama-3.1-8b", 2 * 8 * 128 * 32),  # grouped-query: 8 of 32 heads
        ("palm-8b", 2 * 1 * 256 * 32),  # multi-query
        ("deepseek-v3", (512 + 64) * 61),  # latent
    ],
)
def test_e4_cache_bytes_of_released_models(name, numbers_per_token):
    """The sizes come from the meta device, so no weights are needed."""
    config = preset(name)
    dense = FeedForward(width=1, activation="relu")  # routing needs real data, and does not affect the cache
    layers = tuple(replace(layer, feed_forward=dense) for layer in config.decoder.layers)
    config = replace(config, decoder=replace(config.decoder, layers=layers))
    with torch.device("meta"):
        network = Transformer(config)
        cache = KeyValueCache(config)
        network.decoder(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    cache.advance()
    assert cache.num_bytes == 5 * numbers_per_token * 4  # float32
    published = {"llama-3.1-8b": 131_072, "deepseek-v3": 70_272}  # bytes per token in bfloat16
    if name in published:
        assert cache.num_bytes // 5 // 2 == published[name]


def test_e4_a_cache_grows_with_batch_and_length_and_a_sliding_window_with_batch_only():
    for name, grows in (("llama-3.1-8b", True), ("mistral-7b", False)):
        network = toy(shrink(preset(name)))
        sizes = []
        for batch, length in ((1, 24), (2, 24), (1, 48)):
            cache = KeyValueCache(network.config, slack=0)
            with torch.no_grad():
                network(torch.zeros(batch, length, dtype=torch.long), cache=cache)
            cache.advance()
            sizes.append(cache.num_bytes)
        assert sizes[1] == 2 * sizes[0]
        assert sizes[2] == (2 if grows else 1) * sizes[0]


def test_e1_probabilities_change_at_each_step():
    network = toy(decoder())
    rows = [TokenSequence([1, 2], SamplingOptions(max_new_tokens=6, logprobs=3))]
    for step, _ in enumerate(decode(network, rows), 1):
        assert len(rows[0].tokens) == len(rows[0].logprobs) == step
    assert len({tuple(entry.top.tolist()) for entry in rows[0].logprobs}) > 1
