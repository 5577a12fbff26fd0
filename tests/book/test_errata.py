"""Errata of the book: each test shows the correct statement, that our code follows it, and what the error leads to.

Erratum 10 is in test_e_generation.py.
"""

from dataclasses import replace

import pytest
import torch

from clearhead.architecture import FeedForward, GroupedAttention, Rope, SinusoidalPositions
from clearhead.model.attend import Scoring, attention_steps, fused_attention, reference_attention
from clearhead.model.attention import Attention
from clearhead.model.feed_forward import FeedForwardLayer
from clearhead.model.masks import Mask
from clearhead.model.positions import sinusoids
from tests.book.golden import golden, golden_value
from tests.model.toys import RecordingKernel, assert_close, attention_context, decoder, some_tokens, toy, translator


def test_erratum_1_both_members_of_a_sinusoid_pair_share_the_exponent_2i_over_d():
    """Printed: cos(p / 10000^((2i+1)/d)). The book's own example and sin² + cos² = 1 require 2i/d."""
    width = golden_value("sinusoidal", "width")
    table = sinusoids(torch.arange(2), width, SinusoidalPositions(), torch.float64)
    assert_close(table, golden("sinusoidal", "table"))
    assert_close(table[:, ::2].square() + table[:, 1::2].square(), torch.ones(2, 2, dtype=torch.float64))
    as_printed = torch.tensor([1 / 10000 ** ((2 * i + 1) / width) for i in range(2)], dtype=torch.float64).cos()
    assert (as_printed - golden("sinusoidal", "printed")[1, 1::2]).abs().max() > 0.4


def test_erratum_2_weights_and_context_of_the_translation_example_were_rounded_wrongly():
    """Printed: 0.3374, 0.4125 and 0.6626."""
    states = golden("cross_attention", "encoder_states")[None, None]
    query = golden("cross_attention", "decoder_state")[None, None, None]
    found = attention_steps(query, states, states, Scoring(mask=Mask(), scale=1.0))
    weights, context = found.weights[0, 0, 0], found.output[0, 0, 0]
    assert_close(found.scores[0, 0, 0], golden("cross_attention", "scores"))
    assert_close(weights, golden("cross_attention", "weights"))
    assert_close(context, golden("cross_attention", "context"))
    assert_close(weights, golden("cross_attention", "printed", "weights"), tolerance=3e-4)
    assert_close(context, golden("cross_attention", "printed", "context"), tolerance=3e-4)
    for rounded, printed in (
        (weights.tolist(), golden_value("cross_attention", "printed", "weights")),
        (context.tolist(), golden_value("cross_attention", "printed", "context")),
    ):
        assert [round(value, 4) for value in rounded] != printed


def test_erratum_3_masked_attention_is_self_attention_of_q_times_k_transposed():
    """The book calls it cross-attention and writes QᵀK; with three tokens and keys of width 3 both can be formed."""
    q, k = golden("qkv", "q"), golden("qkv", "k")
    found = attention_steps(q[None, None], k[None, None], k[None, None], Scoring(mask=Mask(causal=True), scale=1.0))
    assert torch.equal(found.scores[0, 0], q @ k.T)
    assert torch.equal(found.scores[0, 0], golden("qkv", "scores"))
    assert not torch.equal(found.scores[0, 0], q.T @ k)
    network, kernel = toy(decoder()), RecordingKernel()
    network(some_tokens(1, 5), kernel=kernel)
    assert (
        kernel.keys[0].shape[2] == kernel.queries[0].shape[2] == 5
    )  # keys come from the tokens themselves, not from an encoder
    assert kernel.scorings[0].mask.causal


def test_erratum_4_both_rope_pairings_are_equal_up_to_the_order_of_the_weight_rows():
    """Reordering the rows of each head's W_q and W_k to 0 2 4 … 1 3 5 … converts one pairing to the other."""
    interleaved = toy(decoder(Rope(pairing="interleaved")))
    half = toy(decoder(Rope(pairing="half")))
    tokens = some_tokens()
    assert (half(tokens) - interleaved(tokens)).abs().max() > 1e-2  # with the same weights they differ
    with torch.no_grad():
        for block in half.decoder.layers:
            for linear in (block.attention.query, block.attention.key):
                for parameter in linear.parameters():
                    pairs = parameter.view(-1, 2, 2, *parameter.shape[1:])  # heads of four entries, two pairs
                    parameter.copy_(pairs.transpose(1, 2).reshape(parameter.shape))
    assert_close(half(tokens), interleaved(tokens))


@pytest.mark.parametrize("kernel", [reference_attention, fused_attention])
def test_erratum_5_a_mask_selects_scores_and_does_not_multiply_them(kernel):
    """A negative score times minus infinity is plus infinity, so a later token would get all the weight."""
    scores = golden("masked_scores", "scores")
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()
    multiplied = scores * torch.where(allowed, 1.0, -torch.inf)
    assert (multiplied == torch.inf).any()
    assert multiplied.softmax(dim=-1).isnan().any()
    unit = torch.eye(12, dtype=torch.float64)[None, None]
    weights = kernel(scores[None, None], unit, unit, Scoring(mask=Mask(allowed), scale=1.0))[0, 0]
    assert_close(weights, golden("masked_scores", "causal_weights"))
    assert not weights[~allowed].any()


def test_erratum_6_a_table_of_sinusoids_is_sliced_along_the_length_and_not_the_width():
    """The book's code has pe[:, :, :length] instead of pe[:, :length]."""
    width, length, longest = 8, 3, 20
    network = toy(decoder(SinusoidalPositions()))
    table = sinusoids(torch.arange(longest), width, SinusoidalPositions(), torch.float64)[None]
    ours = sinusoids(torch.arange(length), width, SinusoidalPositions(), torch.float64)
    assert torch.equal(ours, table[0, :length])
    assert table[:, :, :length].shape == (1, longest, length)
    tokens = some_tokens(1, longest)
    assert_close(network(tokens[:, :length]), network(tokens)[:, :length])


@pytest.mark.parametrize("kernel", [reference_attention, fused_attention])
def test_erratum_8_a_mask_is_not_a_large_negative_number(kernel):
    """-1e9 overflows in half precision and gives uniform weights where everything is masked."""
    with pytest.raises(RuntimeError, match="overflow"):
        torch.zeros(2, dtype=torch.float16).masked_fill(torch.tensor([True, False]), -1e9)
    filled = torch.full((4,), -1e9).softmax(dim=-1)
    assert torch.equal(filled, torch.full((4,), 0.25))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, k, v = torch.randn(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        allowed = torch.ones(4, 4, dtype=torch.bool).tril()
        allowed[0] = False
        output = kernel(q, k, v, Scoring(mask=Mask(allowed), scale=8**-0.5))
        assert output.isfinite().all()
        assert not output[..., 0, :].any()


def test_erratum_9_nothing_is_changed_in_place():
    network, source, target = toy(translator()), some_tokens(2, 6), some_tokens(2, 5)
    encoder_output = network.encode(source)
    tensors = [source, target, encoder_output.states, *network.parameters()]
    versions, copies = [tensor._version for tensor in tensors], [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        first = network.decode(target, encoder_output)
        second = network.decode(target, encoder_output)
    assert torch.equal(first, second)
    assert [tensor._version for tensor in tensors] == versions
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_erratum_9_attention_does_not_change_its_input():
    attention = Attention(GroupedAttention(num_heads=2, num_kv_heads=1, head_width=4), 8)
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    attention(x, attention_context(Mask(causal=True), fused_attention, 5))
    assert x._version == 0
    assert torch.equal(x, before)


@pytest.mark.parametrize("tied", [True, False])
def test_erratum_9_the_network_returns_logits_and_not_probabilities(tied):
    """The loss applies softmax itself; to probabilities it would be applied twice."""
    config = translator()
    network = toy(replace(config, head=replace(config.head, tied=tied)))
    logits = network(some_tokens(2, 6), some_tokens(2, 5))
    assert logits.min() < 0
    assert (logits.sum(dim=-1) - 1).abs().min() > 1e-3
    assert_close(logits.softmax(dim=-1).sum(dim=-1), torch.ones(2, 5, dtype=torch.float64))


def test_erratum_7_a_matrix_product_writes_n_by_k_numbers():
    """The book says n x m for the product of (n, m) and (m, k); a projection writes n x k."""
    n, m, k = 5, 16, 24
    layer = FeedForwardLayer(FeedForward(width=k, activation="relu"), width=m)
    moved = []
    layer.up.register_forward_hook(
        lambda module, inputs, output: moved.extend((inputs[0].numel(), module.weight.numel(), output.numel()))
    )
    layer(torch.randn(n, m))
    assert moved == [n * m, m * k, n * k]
    assert moved[2] != n * m
