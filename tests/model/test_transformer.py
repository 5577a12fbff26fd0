"""The Transformer: padding, packing, statelessness, gradients, and error messages for invalid inputs."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from clearhead.architecture import (
    Alibi,
    Bidirectional,
    Causal,
    Chunked,
    Dropout,
    Embedding,
    Experts,
    FeedForward,
    Head,
    LearnedPositions,
    ModelConfig,
    NoPosition,
    RelativeBuckets,
    Rope,
    Router,
    SinusoidalPositions,
    SlidingWindow,
)
from clearhead.errors import ClearheadError
from clearhead.model.attend import fused_attention, reference_attention
from clearhead.model.transformer import Transformer
from tests.model.random_configs import CONFIGS, SLOW_SETTINGS
from tests.model.toys import (
    CONTEXT,
    FEED_FORWARD,
    POSITIONS,
    VOCAB,
    assert_close,
    decoder,
    encoder,
    grouped,
    latent,
    layer,
    some_tokens,
    stack,
    toy,
    translator,
)

EXPERTS = Experts(
    num_experts=4,
    num_chosen=2,
    expert=FeedForward(width=6, activation="silu", gated=True),
    router=Router(score="sigmoid", selection_bias=True),
    shared=FEED_FORWARD,
)
CONFIG_BY_NAME: dict[str, ModelConfig] = {
    **{name: decoder(position) for name, position in POSITIONS.items()},
    "none": decoder(),
    "window": decoder(Rope(), pattern=SlidingWindow(size=3)),
    "chunk": decoder(Rope(), pattern=Chunked(size=3)),
    "latent": replace(decoder(), decoder=stack(latent())),
    "mixture": replace(decoder(), decoder=stack(grouped(position=Rope()), feed_forward=EXPERTS)),
    "encoder": encoder(LearnedPositions(num_positions=CONTEXT)),
}


def pad(tokens: Tensor, left: int, right: int, filler: int) -> tuple[Tensor, Tensor]:
    """Return the tokens with padding on both sides, and their mask."""
    padding = [torch.full((len(tokens), number), filler) for number in (left, right)]
    mask = [torch.zeros(len(tokens), number, dtype=torch.long) for number in (left, right)]
    return torch.cat((padding[0], tokens, padding[1]), 1), torch.cat((mask[0], torch.ones_like(tokens), mask[1]), 1)


# --- padding and packing


@pytest.mark.parametrize("kernel", [reference_attention, fused_attention])
@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_padding_on_either_side_never_changes_a_real_output(name, kernel):
    network, tokens = toy(CONFIG_BY_NAME[name]), some_tokens(2, 8)
    alone = network(tokens, kernel=kernel)
    for left, right in ((4, 0), (0, 4), (3, 2)):
        for filler in (0, 17):
            inputs, mask = pad(tokens, left, right, filler)
            assert_close(network(inputs, mask, kernel=kernel)[:, left : left + 8], alone, 1e-11)


@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_sequences_of_different_length_in_one_batch_equal_each_alone(name):
    network, long, short = toy(CONFIG_BY_NAME[name]), some_tokens(1, 9), some_tokens(1, 6, seed=5)
    inputs, mask = pad(short, 3, 0, 0)
    both = network(torch.cat((long, inputs)), torch.cat((torch.ones_like(long), mask)))
    assert_close(both[:1], network(long), 1e-11)
    assert_close(both[1:, 3:], network(short), 1e-11)


@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_packed_documents_equal_separate_sequences(name, with_positions):
    network = toy(CONFIG_BY_NAME[name])
    parts = [some_tokens(1, length, seed=length) for length in (3, 5, 4)]
    documents = torch.cat([torch.full_like(part, number) for number, part in enumerate(parts)], dim=1)
    positions = torch.cat([torch.arange(part.shape[1])[None] for part in parts], dim=1) if with_positions else None
    packed = network(torch.cat(parts, dim=1), position_ids=positions, documents=documents)
    assert_close(packed, torch.cat([network(part) for part in parts], dim=1), 1e-11)


@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_padding_between_packed_documents_changes_nothing(name):
    network, parts = toy(CONFIG_BY_NAME[name]), [some_tokens(1, 3), some_tokens(1, 5)]
    filler = torch.zeros(1, 2, dtype=torch.long)
    tokens = torch.cat((filler, parts[0], filler, parts[1], filler), dim=1)
    mask = torch.tensor([[0] * 2 + [1] * 3 + [0] * 2 + [1] * 5 + [0] * 2])
    documents = torch.tensor([[4] * 5 + [9] * 9])
    packed = network(tokens, mask, documents=documents)[:, mask[0].bool()]
    assert_close(packed, torch.cat([network(part) for part in parts], dim=1), 1e-11)


def test_padding_of_an_encoder_decoder_never_changes_a_real_output():
    network, source, target = toy(translator()), some_tokens(2, 6), some_tokens(2, 5)
    alone = network(source, target)
    long_source, source_mask = pad(source, 0, 3, 0)
    long_target, target_mask = pad(target, 2, 1, 0)
    assert_close(network(long_source, long_target, source_mask, target_mask)[:, 2:7], alone)


@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_a_mask_of_ones_equals_no_mask(name):
    network, tokens = toy(CONFIG_BY_NAME[name]), some_tokens()
    assert_close(network(tokens, torch.ones_like(tokens)), network(tokens))


# --- two ways to compute the same


@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_both_kernels_give_the_same_logits(name):
    network, tokens = toy(CONFIG_BY_NAME[name]), some_tokens()
    assert_close(network(tokens, kernel=fused_attention), network(tokens, kernel=reference_attention))


@pytest.mark.parametrize("kernel", [reference_attention, fused_attention])
@pytest.mark.parametrize("query_rank", [None, 6])
def test_latent_attention_absorbed_equals_unfolded(query_rank, kernel):
    network = toy(replace(decoder(), decoder=stack(latent(query_rank=query_rank))))
    inputs, mask = pad(some_tokens(), 2, 0, 0)
    plain, absorbed = (network(inputs, mask, kernel=kernel, absorb=absorb) for absorb in (False, True))
    assert_close(absorbed[:, 2:], plain[:, 2:], 1e-11)


def test_relative_buckets_may_start_after_the_first_layer():
    config = decoder()
    layers = tuple(layer(grouped(position=position)) for position in (NoPosition(), RelativeBuckets()))
    network = toy(replace(config, decoder=replace(config.decoder, layers=layers)))
    network(some_tokens()).sum().backward()
    assert network.decoder.relative_bias.weight.grad.abs().max() > 0


# --- no state


@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_the_network_keeps_no_state(name):
    """A forward pass changes no attribute, no buffer, and no later result."""
    network, tokens = toy(CONFIG_BY_NAME[name]), some_tokens()
    before = {path: set(vars(module)) for path, module in network.named_modules()}
    weights = {path: tensor.clone() for path, tensor in network.state_dict().items()}
    first = network(tokens)
    network(some_tokens(3, 11, seed=7))
    assert torch.equal(network(tokens), first)
    assert {path: set(vars(module)) for path, module in network.named_modules()} == before
    assert network.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[path]) for path, tensor in network.state_dict().items())
    assert {path.rsplit(".")[-1] for path, _ in network.named_buffers()} <= {"selection_bias"}


@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_a_network_is_determined_by_its_config_and_state_dict(name):
    network, tokens = toy(CONFIG_BY_NAME[name]), some_tokens()
    again = Transformer(CONFIG_BY_NAME[name]).double().eval()
    again.load_state_dict(network.state_dict())
    assert torch.equal(again(tokens), network(tokens))
    assert torch.equal(copy.deepcopy(network)(tokens), network(tokens))


def test_equal_seeds_give_equal_networks():
    logits = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        logits.append(Transformer(CONFIG_BY_NAME["rope"])(some_tokens()))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


# --- gradients, dropout, precision


@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_gradients_reach_every_parameter(name):
    network = toy(CONFIG_BY_NAME[name])
    network(some_tokens(4, 12)).square().sum().backward()
    assert [path for path, part in network.named_parameters() if part.grad is None or not part.grad.any()] == []


def test_gradients_reach_every_parameter_of_an_encoder_decoder():
    network = toy(translator(share_embeddings=True))
    network(some_tokens(2, 6), some_tokens(2, 5)).square().sum().backward()
    assert [path for path, part in network.named_parameters() if part.grad is None or not part.grad.any()] == []
    assert network.encoder.embedding.tokens is network.decoder.embedding.tokens


@pytest.mark.parametrize("place", ["embedding", "residual", "attention", "activation"])
@pytest.mark.parametrize("name", ["rope", "latent", "mixture"])
def test_dropout_acts_in_training_only(name, place):
    network, tokens = toy(replace(CONFIG_BY_NAME[name], dropout=Dropout(**{place: 0.5}))), some_tokens()
    plain = toy(CONFIG_BY_NAME[name])
    plain.load_state_dict(network.state_dict())
    assert_close(network(tokens), plain(tokens))
    network.train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(network(tokens))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], network.eval()(tokens))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15), (torch.float16, 0.02)])
@pytest.mark.parametrize("name", CONFIG_BY_NAME)
def test_lower_precision_is_close_to_float64(name, dtype, tolerance):
    precise, rounded = toy(CONFIG_BY_NAME[name]), toy(CONFIG_BY_NAME[name], dtype)
    precise.load_state_dict(rounded.state_dict())  # the rounded weights
    logits = rounded(some_tokens())
    assert logits.dtype == dtype
    assert (logits.double() - precise(some_tokens())).abs().median() < tolerance


# --- embedding and head


def test_token_types_are_added_and_default_to_0():
    config = encoder()
    embedding = Embedding(vocab_size=VOCAB, num_token_types=2)
    network = toy(replace(config, encoder=replace(config.encoder, embedding=embedding)))
    tokens = some_tokens()
    types = torch.zeros_like(tokens)
    assert torch.equal(network(tokens, token_types=types), network(tokens))
    assert (network(tokens, token_types=types + 1) - network(tokens)).abs().max() > 1e-2
    x = network.encoder.embedding(tokens, torch.arange(8)[None], types + 1)
    assert_close(x, network.encoder.embedding.tokens.weight[tokens] + network.encoder.embedding.types.weight[1])


def test_learned_positions_start_at_their_offset():
    network = toy(decoder(LearnedPositions(num_positions=CONTEXT, offset=2)))
    table = network.decoder.embedding.positions.weight
    assert table.shape[0] == CONTEXT + 2
    network(some_tokens(1, CONTEXT)).square().sum().backward()
    assert not table.grad[:2].any()
    assert table.grad[2:].any(dim=-1).all()


def test_head_applies_scale_then_bias_then_softcap():
    config = replace(decoder(), head=Head(tied=False, bias=True, scale=0.5, softcap=2.0))
    network = toy(config)
    plain = network.hidden_states(some_tokens()) @ network.head.weight.T * 0.5 + network.head.bias
    assert_close(network(some_tokens()), 2 * torch.tanh(plain / 2))


def test_a_network_without_a_head_returns_hidden_states():
    network = toy(replace(decoder(Rope()), head=None))
    assert torch.equal(network(some_tokens()), network.hidden_states(some_tokens()))
    assert network(some_tokens()).shape == (2, 8, 16)


# --- invalid inputs

INVALID = {
    "one dimension": (
        (torch.tensor([1, 2, 3]),),
        {},
        r"tokens has shape \(3,\); it must be \(batch, length\), and not empty",
    ),
    "no tokens": (
        (torch.zeros(1, 0, dtype=torch.long),),
        {},
        r"has shape \(1, 0\); it must be \(batch, length\), and not empty",
    ),
    "float tokens": ((torch.zeros(1, 3),), {}, "tokens must be int64 or int32, not torch.float32"),
    "token id too large": (
        (torch.tensor([[1, VOCAB]]),),
        {},
        f"token id {VOCAB} is out of range: this model has {VOCAB}",
    ),
    "negative token id": ((torch.tensor([[1, -100]]),), {}, "token id -100 is out of range"),
    "mask too short": (
        (some_tokens(), torch.ones(2, 7)),
        {},
        r"mask has shape \(2, 7\); it must have that of tokens, \(2, 8\)",
    ),
    "mask without batch": (
        (some_tokens(), torch.ones(8)),
        {},
        r"mask has shape \(8,\); it must have that of tokens, \(2, 8\)",
    ),
    "mask with four dimensions": ((some_tokens(), torch.ones(2, 1, 8, 8)), {}, r"mask has shape \(2, 1, 8, 8\)"),
    "positions too short": (
        (some_tokens(),),
        {"position_ids": torch.arange(7)[None]},
        r"position_ids has shape \(1, 7\)",
    ),
    "positions without batch": ((some_tokens(),), {"position_ids": torch.arange(8)}, r"position_ids has shape \(8,\)"),
    "documents of another shape": ((some_tokens(),), {"documents": torch.zeros(2, 7)}, r"documents has shape \(2, 7\)"),
    "token types of another shape": (
        (some_tokens(),),
        {"token_types": torch.zeros(2, 7)},
        r"token_types has shape \(2, 7\)",
    ),
    "token types of a model without them": (
        (some_tokens(),),
        {"token_types": torch.zeros_like(some_tokens())},
        "this model has no token types; leave out token_types",
    ),
    "position too large": (
        (some_tokens(),),
        {"position_ids": torch.full((1, 8), CONTEXT)},
        f"position {CONTEXT} is out",
    ),
    "sequence too long": (
        (some_tokens(1, CONTEXT + 1),),
        {},
        f"position {CONTEXT} is out of range: this model has {CONTEXT}",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_inputs_raise_a_clear_error(name):
    network = toy(decoder(LearnedPositions(num_positions=CONTEXT)))
    inputs, options, message = INVALID[name]
    with pytest.raises(ClearheadError, match=message):
        network(*inputs, **options)


def test_invalid_inputs_of_an_encoder_decoder_raise_for_source_and_target():
    network, good, bad = toy(translator()), some_tokens(), torch.tensor([[VOCAB]])
    for source, target in ((good, bad), (bad, good)):
        with pytest.raises(ClearheadError, match="token id"):
            network(source, target)
    with pytest.raises(ClearheadError, match=r"mask has shape \(2, 3\)"):
        network(good, good, torch.ones(2, 3))


def test_encode_decode_and_pool_raise_if_the_model_lacks_the_part():
    tokens, decoder_only, encoder_decoder = some_tokens(), toy(decoder()), toy(translator())
    with pytest.raises(ClearheadError, match="no encoder"):
        decoder_only.encode(tokens)
    with pytest.raises(ClearheadError, match="decode needs an encoder-decoder model"):
        decoder_only.decode(tokens, encoder_decoder.encode(tokens))
    with pytest.raises(ClearheadError, match="no pooler"):
        decoder_only.pool(decoder_only.hidden_states(tokens))


def test_int32_tokens_and_positions_shared_by_the_batch_are_accepted():
    network, tokens = toy(decoder(Rope())), some_tokens()
    assert torch.equal(network(tokens.int()), network(tokens))
    assert torch.equal(network(tokens, position_ids=torch.arange(8)[None]), network(tokens))
    per_sequence = torch.arange(8).expand(2, 8)
    assert torch.equal(network(tokens, position_ids=per_sequence), network(tokens))


def test_only_learned_positions_limit_the_length():
    for position in (Rope(), Alibi(), SinusoidalPositions(), NoPosition()):
        assert toy(decoder(position))(some_tokens(1, 2 * CONTEXT)).isfinite().all()


def test_a_pattern_determines_which_tokens_affect_the_logits():
    """With one layer, the logits of the last of nine tokens depend on exactly the tokens it attends to."""
    for pattern, attended in (
        (Causal(), range(9)),
        (SlidingWindow(size=3), (6, 7, 8)),
        (Chunked(size=4), (8,)),
        (Bidirectional(), range(9)),
    ):
        config = decoder(pattern=pattern)
        network = toy(replace(config, decoder=replace(config.decoder, layers=config.decoder.layers[:1])))
        tokens = some_tokens(1, 9)
        for position in range(9):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % VOCAB
            differs = (network(changed) - network(tokens))[0, -1].abs().max() > 1e-9
            assert differs == (position in attended)


# --- random configs


@SLOW_SETTINGS
@given(CONFIGS)
def test_every_valid_config_builds_and_runs(config):
    """The output is finite, has the right shape, and is the same with both kernels, with padding and without."""
    torch.manual_seed(0)
    network = Transformer(config).double().eval()
    tokens = torch.randint(0, config.vocab_size, (2, 2), generator=torch.Generator().manual_seed(0))
    for mask in (None, torch.tensor([[1, 1], [0, 1]])):
        with torch.no_grad():
            found, expected = (
                network(tokens, mask, kernel=kernel) for kernel in (fused_attention, reference_attention)
            )
        if config.head is None and config.classifier is not None and config.classifier.reads != "tokens":
            assert found.shape == (2, config.classifier.num_labels)
        elif config.head is None and config.classifier is not None:
            assert found.shape == (2, 2, config.classifier.num_labels)
        else:
            assert found.shape == (2, 2, config.vocab_size if config.head else config.width)
        assert found.isfinite().all()
        assert_close(found, expected, 1e-9)


def test_encoder_output_is_required_with_cross_attention_and_rejected_without():
    network = toy(translator())
    with pytest.raises(ClearheadError, match="it needs encoder_output"):
        network.hidden_states(some_tokens())
    with pytest.raises(ClearheadError, match="leave out encoder_output"):
        toy(decoder()).hidden_states(some_tokens(), encoder_output=network.encode(some_tokens()))
