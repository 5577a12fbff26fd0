"""Part A of the book, attention, statement by statement: A7 to A10, several heads, permutations and cross-attention."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from clearhead.architecture import (
    Bidirectional,
    Embedding,
    FeedForward,
    GroupedAttention,
    Layer,
    ModelConfig,
    Rope,
    Stack,
)
from clearhead.model.attend import Scoring, fused_attention, reference_attention
from clearhead.model.attention import Attention
from clearhead.model.masks import Mask
from clearhead.model.transformer import EncoderOutput, Transformer
from tests.book.golden import golden_value
from tests.model.toys import (
    NORM,
    assert_close,
    attention_context,
    decoder,
    encoder,
    grouped,
    redraw,
    some_tokens,
    toy,
    translator,
)

KERNELS = [reference_attention, fused_attention]

# --- A7


def multi_head(num_heads: int, num_kv_heads: int, head_width: int, width: int = 16) -> Attention:
    """Return an attention layer with random weights in float64."""
    config = GroupedAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_width=head_width)
    attention = Attention(config, width)
    redraw(attention)
    return attention.double()


@torch.no_grad()
def single_head(attention: Attention, number: int) -> Attention:
    """Return one head as a layer of its own: its rows of W_q, W_k and W_v, and its columns of W_o."""
    rows = slice(number * attention.config.head_width, (number + 1) * attention.config.head_width)
    single = Attention(replace(attention.config, num_heads=1, num_kv_heads=1), 16).double()
    for name in ("query", "key", "value"):
        getattr(single, name).weight.copy_(getattr(attention, name).weight[rows])
    single.output.weight.copy_(attention.output.weight[:, rows])
    return single


@pytest.mark.parametrize("kernel", KERNELS)
def test_a7_multi_head_is_the_heads_one_by_one_concatenated_and_projected(kernel, generator):
    attention = multi_head(num_heads=4, num_kv_heads=4, head_width=4)
    x, context = torch.randn(2, 6, 16, generator=generator, dtype=torch.float64), attention_context(Mask(), kernel, 6)
    output = attention(x, context)
    heads = [single_head(attention, number) for number in range(4)]
    assert_close(output, sum(head(x, context) for head in heads))
    for head in heads:
        head.output = nn.Identity()
    concatenated = torch.cat([head(x, context) for head in heads], dim=-1)
    assert_close(output, concatenated @ attention.output.weight.T)


def test_a7_equals_the_multi_head_attention_of_torch(generator):
    attention, theirs = multi_head(4, 4, 4), nn.MultiheadAttention(16, 4, bias=False, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([attention.query.weight, attention.key.weight, attention.value.weight]))
        theirs.out_proj.weight.copy_(attention.output.weight)
    x = torch.randn(2, 6, 16, generator=generator, dtype=torch.float64)
    assert_close(attention(x, attention_context(Mask(), fused_attention, 6)), theirs(x, x, x)[0])


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a7_grouped_queries_share_the_key_and_value_of_their_group(num_kv_heads, kernel, generator):
    """One key-value head is multi-query attention. Adjacent query heads form a group."""
    shared, repeated = multi_head(4, num_kv_heads, 4), multi_head(4, 4, 4)
    with torch.no_grad():
        repeated.query.weight.copy_(shared.query.weight)
        repeated.output.weight.copy_(shared.output.weight)
        for name in ("key", "value"):
            by_head = getattr(shared, name).weight.view(num_kv_heads, 4, 16)
            getattr(repeated, name).weight.copy_(by_head.repeat_interleave(4 // num_kv_heads, dim=0).flatten(0, 1))
    x = torch.randn(2, 6, 16, generator=generator, dtype=torch.float64)
    context = attention_context(Mask(causal=True), kernel, 6)
    assert_close(shared(x, context), repeated(x, context))


def multiplications(attention: Attention, num_tokens: int) -> int:
    """Return the multiply-accumulates of one sequence, counted by torch while the reference kernel runs."""
    x = torch.zeros(1, num_tokens, attention.query.in_features, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention(x, attention_context(Mask(), reference_attention, num_tokens))
    return counter.get_total_flops() // 2


def test_a7_many_narrow_heads_cost_as_much_as_one_wide_head():
    width, num_tokens = 16, 10
    one, many = multi_head(1, 1, 16), multi_head(8, 8, 2)
    assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in many.parameters()) == 4 * width**2
    expected = 4 * num_tokens * width**2 + 2 * num_tokens**2 * width
    assert multiplications(one, num_tokens) == multiplications(many, num_tokens) == expected


@pytest.mark.parametrize("num_heads", [2, 8])
def test_a7_multi_query_saves_2_m_d_squared_times_h_minus_1(num_heads):
    """For M tokens and heads of the full width d, as in the book. With heads of width d/h it saves 1/h of that."""
    width, num_tokens = 16, 10
    saved = multiplications(multi_head(num_heads, num_heads, width), num_tokens) - multiplications(
        multi_head(num_heads, 1, width), num_tokens
    )
    assert saved == 2 * num_tokens * width**2 * (num_heads - 1)
    narrow = width // num_heads
    saved = multiplications(multi_head(num_heads, num_heads, narrow), num_tokens) - multiplications(
        multi_head(num_heads, 1, narrow), num_tokens
    )
    assert saved * num_heads == 2 * num_tokens * width**2 * (num_heads - 1)


def test_a7_the_cost_grows_with_the_number_of_key_value_heads():
    counts = [multiplications(multi_head(8, num_kv_heads, 2), 10) for num_kv_heads in (1, 2, 4, 8)]
    assert counts == sorted(set(counts))


# --- A8


def test_a8_attention_is_permutation_equivariant(generator):
    attention = multi_head(4, 2, 4)
    x = torch.randn(1, 7, 16, generator=generator, dtype=torch.float64)
    order = torch.randperm(7, generator=generator)
    context = attention_context(Mask(), fused_attention, 7)
    assert_close(attention(x[:, order], context), attention(x, context)[:, order])


def test_a8_an_encoder_without_positions_is_permutation_equivariant_and_a_causal_decoder_is_not(generator):
    tokens, order = some_tokens(1, 7), torch.randperm(7, generator=generator)
    network = toy(encoder())
    assert_close(network(tokens[:, order]), network(tokens)[:, order])
    causal = toy(decoder())
    assert (causal(tokens[:, order]) - causal(tokens)[:, order]).abs().max() > 0.1


@pytest.mark.parametrize("kernel", KERNELS)
def test_a8_sequences_of_a_batch_are_independent(kernel):
    network, tokens = toy(decoder(Rope())), some_tokens(3)
    together = network(tokens, kernel=kernel)
    assert_close(together, torch.cat([network(row, kernel=kernel) for row in tokens.split(1)]))
    inputs = []
    network.decoder.embedding.register_forward_hook(lambda *call: inputs.append(call[-1]))
    (gradient,) = torch.autograd.grad(network(tokens, kernel=kernel)[1].sum(), inputs)
    assert gradient[1].abs().min() > 0
    assert not gradient[[0, 2]].any()


# --- A9


def argmax_config(num_heads: int, num_levels: int, vocab_size: int, width: int, head_width: int) -> ModelConfig:
    """Return a config whose scale is so large that each head attends to one key, with all other weights exactly 0."""
    attention = GroupedAttention(
        num_heads=num_heads, num_kv_heads=num_heads, head_width=head_width, pattern=Bidirectional(), scale=1e9
    )
    layer = Layer(attention=attention, feed_forward=FeedForward(width=1, activation="relu"), norm=NORM)
    stack = Stack(embedding=Embedding(vocab_size=vocab_size), layers=(layer,) * num_levels)
    return ModelConfig(width=width, context=vocab_size, encoder=stack)


def receptive_field(network: Transformer, num_tokens: int, node: int) -> int:
    """Return the number of input tokens that affect the output of the last level at `node`. Every token occurs once."""
    states = network(torch.arange(num_tokens)[None])[0, node]
    (gradient,) = torch.autograd.grad(states.square().sum(), network.encoder.embedding.tokens.weight)
    return int(gradient.any(dim=-1).sum())


@pytest.mark.parametrize("num_heads", golden_value("receptive_field", "heads"))
@pytest.mark.parametrize("num_levels", golden_value("receptive_field", "levels"))
def test_a9_receptive_field_grows_as_h_plus_1_to_the_n(num_heads, num_levels):
    """The largest possible field: head a of level l attends to the token (a + 1)·(h + 1)^l positions later."""
    size = golden_value("receptive_field", "size")[str(num_heads)][num_levels - 1]
    network = Transformer(argmax_config(num_heads, num_levels, size, width=size + 1, head_width=size)).double()
    unit = torch.eye(size, dtype=torch.float64)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2:
                parameter.zero_()
        network.encoder.embedding.tokens.weight.copy_(torch.cat((unit, torch.ones(size, 1)), dim=1))
        for level, block in enumerate(network.encoder.layers):
            for head in range(num_heads):
                rows = slice(head * size, (head + 1) * size)
                offset = (head + 1) * (num_heads + 1) ** level
                block.attention.query.weight[rows, :size] = unit.roll(offset, dims=0)
                block.attention.key.weight[rows, :size] = unit
                block.attention.value.weight[head * size, size] = 1.0
                block.attention.output.weight[size, head * size] = 1.0
    assert receptive_field(network, size, node=0) == size


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("num_levels", [1, 2, 3])
def test_a9_random_weights_never_exceed_that_receptive_field(num_heads, num_levels):
    size = golden_value("receptive_field", "size")[str(num_heads)][num_levels - 1]
    network = Transformer(argmax_config(num_heads, num_levels, vocab_size=40, width=8, head_width=4))
    redraw(network)
    network.double()
    sizes = [receptive_field(network, 40, node) for node in range(40)]
    assert num_levels < max(sizes) <= size < 40


# --- A10


@pytest.mark.parametrize("kernel", KERNELS)
def test_a10_self_causal_and_cross_are_three_uses_of_one_module(kernel, generator):
    attention = multi_head(4, 2, 4)
    x, encoder_output = (torch.randn(2, length, 16, generator=generator, dtype=torch.float64) for length in (5, 9))
    bidirectional = attention(x, attention_context(Mask(), kernel, 5))
    causal = attention(x, attention_context(Mask(causal=True), kernel, 5))
    cross = attention(x, attention_context(Mask(), kernel, 5), encoder_output)
    assert bidirectional.shape == causal.shape == cross.shape == x.shape
    assert_close(attention(x, attention_context(Mask(), kernel, 5), x), bidirectional)
    assert_close(causal[:, -1], bidirectional[:, -1])
    assert_close(attention(x[:, :1], attention_context(Mask(), kernel, 1), encoder_output), cross[:, :1])
    assert (causal[:, 0] - bidirectional[:, 0]).abs().max() > 1e-3
    assert (cross - bidirectional).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a10_a_query_without_allowed_keys_gives_zeros_and_never_nan(kernel, with_bias, dtype, generator):
    q, k, v = (torch.randn(2, 4, 5, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    bias = torch.randn(1, 4, 5, 5, generator=generator).to(dtype).requires_grad_() if with_bias else None
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    allowed[1, :, :, :2] = False  # the first two queries of the second sequence have no allowed key
    output = kernel(q, k, v, Scoring(mask=Mask(allowed), scale=0.3, bias=bias))
    assert output.dtype == dtype
    assert not output[1, :, :2].any()
    assert output[1, :, 2:].any(dim=-1).all()
    output.float().square().sum().backward()
    for tensor in (output, q.grad, k.grad, v.grad, *((bias.grad,) if with_bias else ())):
        assert tensor.isfinite().all()
    assert not q.grad[1, :, :2].any()
    assert not k.grad[1, :, :2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a10_a_sequence_of_padding_only_gives_finite_logits_and_gradients(kernel, dtype):
    network, tokens = toy(decoder(Rope()), dtype), some_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[1] = 0, 0
    logits = network(tokens, mask, kernel=kernel)
    logits.float().square().mean().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a10_a_source_of_padding_only_gives_finite_logits(kernel):
    network, source, target = toy(translator()), some_tokens(2, 6), some_tokens(2, 4)
    mask = torch.ones_like(source)
    mask[1] = 0
    logits = network(source, target, mask, kernel=kernel)
    assert logits.isfinite().all()
    logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def test_a10_cross_attention_ignores_the_padding_of_the_source():
    network, source, target = toy(translator()), some_tokens(2, 6), some_tokens(2, 4)
    mask = torch.ones_like(source)
    mask[:, 4:] = 0
    assert_close(network(source, target, mask), network(source[:, :4], target))
    encoder_output = network.encode(source)
    changed = EncoderOutput(encoder_output.states.clone(), mask)
    changed.states[:, 4:] = 1e6
    assert_close(network.decode(target, changed), network.decode(target, EncoderOutput(encoder_output.states, mask)))


def test_a10_both_kernels_agree_with_biases_and_wider_values(generator):
    attention = Attention(grouped(value_width=6, output_bias=True), 16)
    redraw(attention)
    attention.double()
    x = torch.randn(1, 5, 16, generator=generator, dtype=torch.float64)
    assert_close(
        attention(x, attention_context(Mask(), fused_attention, 5)),
        attention(x, attention_context(Mask(), reference_attention, 5)),
    )
