"""The whole network: padding, packing, state, gradients and the sentences for wrong inputs."""

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
from tests.model.random_configs import CONFIGS, SLOWLY
from tests.model.toys import (
    CONTEXT,
    INNER,
    POSITIONS,
    VOCAB,
    close,
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
    shared=INNER,
)
KINDS: dict[str, ModelConfig] = {
    **{name: decoder(position) for name, position in POSITIONS.items()},
    "none": decoder(),
    "window": decoder(Rope(), pattern=SlidingWindow(size=3)),
    "chunk": decoder(Rope(), pattern=Chunked(size=3)),
    "latent": replace(decoder(), decoder=stack(latent())),
    "mixture": replace(decoder(), decoder=stack(grouped(position=Rope()), feed_forward=EXPERTS)),
    "encoder": encoder(LearnedPositions(num_positions=CONTEXT)),
}


def padded(tokens: Tensor, left: int, right: int, filler: int) -> tuple[Tensor, Tensor]:
    pad = [torch.full((len(tokens), number), filler) for number in (left, right)]
    mask = [torch.zeros(len(tokens), number, dtype=torch.long) for number in (left, right)]
    return torch.cat((pad[0], tokens, pad[1]), 1), torch.cat((mask[0], torch.ones_like(tokens), mask[1]), 1)


# --- padding and packing


@pytest.mark.parametrize("kernel", [reference_attention, fused_attention])
@pytest.mark.parametrize("name", KINDS)
def test_padding_on_either_side_never_changes_a_real_output(name, kernel):
    network, tokens = toy(KINDS[name]), some_tokens(2, 8)
    alone = network(tokens, kernel=kernel)
    for left, right in ((4, 0), (0, 4), (3, 2)):
        for filler in (0, 17):
            inputs, mask = padded(tokens, left, right, filler)
            close(network(inputs, mask, kernel=kernel)[:, left : left + 8], alone, 1e-11)


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_different_length_in_one_batch(name):
    network, long, short = toy(KINDS[name]), some_tokens(1, 9), some_tokens(1, 6, seed=5)
    inputs, mask = padded(short, 3, 0, 0)
    both = network(torch.cat((long, inputs)), torch.cat((torch.ones_like(long), mask)))
    close(both[:1], network(long), 1e-11)
    close(both[1:, 3:], network(short), 1e-11)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_packed_documents_are_computed_as_if_apart(name, told):
    network = toy(KINDS[name])
    parts = [some_tokens(1, length, seed=length) for length in (3, 5, 4)]
    documents = torch.cat([torch.full_like(part, number) for number, part in enumerate(parts)], dim=1)
    positions = torch.cat([torch.arange(part.shape[1])[None] for part in parts], dim=1) if told else None
    packed = network(torch.cat(parts, dim=1), position_ids=positions, documents=documents)
    close(packed, torch.cat([network(part) for part in parts], dim=1), 1e-11)


@pytest.mark.parametrize("name", KINDS)
def test_padding_between_packed_documents(name):
    network, parts = toy(KINDS[name]), [some_tokens(1, 3), some_tokens(1, 5)]
    filler = torch.zeros(1, 2, dtype=torch.long)
    tokens = torch.cat((filler, parts[0], filler, parts[1], filler), dim=1)
    mask = torch.tensor([[0] * 2 + [1] * 3 + [0] * 2 + [1] * 5 + [0] * 2])
    documents = torch.tensor([[4] * 5 + [9] * 9])
    packed = network(tokens, mask, documents=documents)[:, mask[0].bool()]
    close(packed, torch.cat([network(part) for part in parts], dim=1), 1e-11)


def test_padding_of_an_encoder_decoder_never_changes_a_real_output():
    network, source, target = toy(translator()), some_tokens(2, 6), some_tokens(2, 5)
    alone = network(source, target)
    long_source, source_mask = padded(source, 0, 3, 0)
    long_target, target_mask = padded(target, 2, 1, 0)
    close(network(long_source, long_target, source_mask, target_mask)[:, 2:7], alone)


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_of_ones_is_no_mask(name):
    network, tokens = toy(KINDS[name]), some_tokens()
    close(network(tokens, torch.ones_like(tokens)), network(tokens))


# --- twins


@pytest.mark.parametrize("name", KINDS)
def test_both_kernels_give_the_same_logits(name):
    network, tokens = toy(KINDS[name]), some_tokens()
    close(network(tokens, kernel=fused_attention), network(tokens, kernel=reference_attention))


@pytest.mark.parametrize("kernel", [reference_attention, fused_attention])
@pytest.mark.parametrize("query_rank", [None, 6])
def test_latent_attention_absorbed_equals_unfolded(query_rank, kernel):
    network = toy(replace(decoder(), decoder=stack(latent(query_rank=query_rank))))
    inputs, mask = padded(some_tokens(), 2, 0, 0)
    plain, absorbed = (network(inputs, mask, kernel=kernel, absorb=absorb) for absorb in (False, True))
    close(absorbed[:, 2:], plain[:, 2:], 1e-11)


def test_relative_buckets_may_start_after_the_first_layer():
    config = decoder()
    layers = tuple(layer(grouped(position=position)) for position in (NoPosition(), RelativeBuckets()))
    network = toy(replace(config, decoder=replace(config.decoder, layers=layers)))
    network(some_tokens()).sum().backward()
    assert network.decoder.relative_bias.weight.grad.abs().max() > 0


# --- no state


@pytest.mark.parametrize("name", KINDS)
def test_the_network_keeps_no_state(name):
    """A forward leaves nothing behind: not in attributes, not in buffers, not in the next forward."""
    network, tokens = toy(KINDS[name]), some_tokens()
    before = {path: set(vars(module)) for path, module in network.named_modules()}
    weights = {path: tensor.clone() for path, tensor in network.state_dict().items()}
    first = network(tokens)
    network(some_tokens(3, 11, seed=7))
    assert torch.equal(network(tokens), first)
    assert {path: set(vars(module)) for path, module in network.named_modules()} == before
    assert network.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[path]) for path, tensor in network.state_dict().items())
    assert {path.rsplit(".")[-1] for path, _ in network.named_buffers()} <= {"selection_bias"}


@pytest.mark.parametrize("name", KINDS)
def test_weights_carry_all_there_is(name):
    network, tokens = toy(KINDS[name]), some_tokens()
    again = Transformer(KINDS[name]).double().eval()
    again.load_state_dict(network.state_dict())
    assert torch.equal(again(tokens), network(tokens))
    assert torch.equal(copy.deepcopy(network)(tokens), network(tokens))


def test_equal_seeds_give_equal_networks():
    networks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        networks.append(Transformer(KINDS["rope"])(some_tokens()))
    assert torch.equal(networks[0], networks[1])
    assert not torch.equal(networks[0], networks[2])


# --- gradients, dropout, precision


@pytest.mark.parametrize("name", KINDS)
def test_gradients_reach_every_parameter(name):
    network = toy(KINDS[name])
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
    network, tokens = toy(replace(KINDS[name], dropout=Dropout(**{place: 0.5}))), some_tokens()
    plain = toy(KINDS[name])
    plain.load_state_dict(network.state_dict())
    close(network(tokens), plain(tokens))
    network.train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(network(tokens))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], network.eval()(tokens))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15), (torch.float16, 0.02)])
@pytest.mark.parametrize("name", KINDS)
def test_lower_precision_is_near(name, dtype, tolerance):
    precise, rounded = toy(KINDS[name]), toy(KINDS[name], dtype)
    precise.load_state_dict(rounded.state_dict())  # the rounded weights
    logits = rounded(some_tokens())
    assert logits.dtype == dtype
    assert (logits.double() - precise(some_tokens())).abs().median() < tolerance


# --- embedding and head


def test_token_types_are_added_and_default_to_the_first():
    config = encoder()
    embedding = Embedding(vocab_size=VOCAB, num_token_types=2)
    network = toy(replace(config, encoder=replace(config.encoder, embedding=embedding)))
    tokens = some_tokens()
    types = torch.zeros_like(tokens)
    assert torch.equal(network(tokens, token_types=types), network(tokens))
    assert (network(tokens, token_types=types + 1) - network(tokens)).abs().max() > 1e-2
    x = network.encoder.embedding(tokens, torch.arange(8)[None], types + 1)
    close(x, network.encoder.embedding.tokens.weight[tokens] + network.encoder.embedding.types.weight[1])


def test_learned_positions_skip_their_offset():
    network = toy(decoder(LearnedPositions(num_positions=CONTEXT, offset=2)))
    table = network.decoder.embedding.positions.weight
    assert table.shape[0] == CONTEXT + 2
    network(some_tokens(1, CONTEXT)).square().sum().backward()
    assert not table.grad[:2].any()
    assert table.grad[2:].any(dim=-1).all()


def test_head_scales_then_adds_its_bias_then_caps():
    config = replace(decoder(), head=Head(tied=False, bias=True, scale=0.5, softcap=2.0))
    network = toy(config)
    plain = network.hidden_states(some_tokens()) @ network.head.weight.T * 0.5 + network.head.bias
    close(network(some_tokens()), 2 * torch.tanh(plain / 2))


def test_without_a_head_hidden_states_come_out():
    network = toy(replace(decoder(Rope()), head=None))
    assert torch.equal(network(some_tokens()), network.hidden_states(some_tokens()))
    assert network(some_tokens()).shape == (2, 8, 16)


# --- wrong inputs

WRONG = {
    "one axis": ((torch.tensor([1, 2, 3]),), {}, r"tokens must be \(batch, length\) and not empty, not \(3,\)"),
    "no token": ((torch.zeros(1, 0, dtype=torch.long),), {}, r"not empty, not \(1, 0\)"),
    "floats": ((torch.zeros(1, 3),), {}, "tokens must be whole numbers .* not torch.float32"),
    "too large": ((torch.tensor([[1, VOCAB]]),), {}, f"token id {VOCAB} is out of range: this model has {VOCAB}"),
    "negative": ((torch.tensor([[1, -100]]),), {}, "token id -100 is out of range"),
    "mask too short": ((some_tokens(), torch.ones(2, 7)), {}, r"mask is \(2, 7\); it must be \(2, 8\)"),
    "mask without batch": ((some_tokens(), torch.ones(8)), {}, r"mask is \(8,\); it must be \(2, 8\)"),
    "mask of four axes": ((some_tokens(), torch.ones(2, 1, 8, 8)), {}, r"mask is \(2, 1, 8, 8\)"),
    "positions too short": ((some_tokens(),), {"position_ids": torch.arange(7)[None]}, r"position_ids is \(1, 7\)"),
    "positions without batch": ((some_tokens(),), {"position_ids": torch.arange(8)}, r"position_ids is \(8,\)"),
    "documents of other shape": ((some_tokens(),), {"documents": torch.zeros(2, 7)}, r"documents is \(2, 7\)"),
    "types of other shape": ((some_tokens(),), {"token_types": torch.zeros(2, 7)}, r"token_types is \(2, 7\)"),
    "types it has not": ((some_tokens(),), {"token_types": torch.zeros_like(some_tokens())}, "this model has none"),
    "position beyond": ((some_tokens(),), {"position_ids": torch.full((1, 8), CONTEXT)}, f"position {CONTEXT} is out"),
    "too long": ((some_tokens(1, CONTEXT + 1),), {}, f"position {CONTEXT} is out of range: this model has {CONTEXT}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_get_one_clear_sentence(name):
    network = toy(decoder(LearnedPositions(num_positions=CONTEXT)))
    inputs, options, sentence = WRONG[name]
    with pytest.raises(ClearheadError, match=sentence):
        network(*inputs, **options)


def test_wrong_inputs_of_either_side_of_an_encoder_decoder():
    network, good, bad = toy(translator()), some_tokens(), torch.tensor([[VOCAB]])
    for source, target in ((good, bad), (bad, good)):
        with pytest.raises(ClearheadError, match="token id"):
            network(source, target)
    with pytest.raises(ClearheadError, match=r"mask is \(2, 3\)"):
        network(good, good, torch.ones(2, 3))


def test_what_a_model_does_not_have():
    tokens, alone, both = some_tokens(), toy(decoder()), toy(translator())
    with pytest.raises(ClearheadError, match="no encoder"):
        alone.encode(tokens)
    with pytest.raises(ClearheadError, match="does not decode from a memory"):
        alone.decode(tokens, both.encode(tokens))
    with pytest.raises(ClearheadError, match="no pooler"):
        alone.pool(alone.hidden_states(tokens))


def test_int32_tokens_and_one_row_of_positions_are_welcome():
    network, tokens = toy(decoder(Rope())), some_tokens()
    assert torch.equal(network(tokens.int()), network(tokens))
    assert torch.equal(network(tokens, position_ids=torch.arange(8)[None]), network(tokens))
    both = torch.arange(8).expand(2, 8)
    assert torch.equal(network(tokens, position_ids=both), network(tokens))


def test_only_learned_positions_limit_the_length():
    for position in (Rope(), Alibi(), SinusoidalPositions(), NoPosition()):
        assert toy(decoder(position))(some_tokens(1, 2 * CONTEXT)).isfinite().all()


def test_reach_is_what_the_layer_says():
    """Logits at the last of nine tokens change with the tokens in reach and with no other. One layer only."""
    for pattern, seen in (
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
            moved = (network(changed) - network(tokens))[0, -1].abs().max() > 1e-9
            assert moved == (position in seen)


# --- whatever can be written down


@SLOWLY
@given(CONFIGS)
def test_every_config_that_passes_its_checks_builds_and_runs(config):
    """Finite logits or hidden states of the right shape, the same by both kernels, with padding and without."""
    torch.manual_seed(0)
    network = Transformer(config).double().eval()
    tokens = torch.randint(0, config.vocab_size, (2, 2), generator=torch.Generator().manual_seed(0))
    for mask in (None, torch.tensor([[1, 1], [0, 1]])):
        with torch.no_grad():
            found, expected = (
                network(tokens, mask, kernel=kernel) for kernel in (fused_attention, reference_attention)
            )
        assert found.shape == (2, 2, config.vocab_size if config.head else config.width)
        assert found.isfinite().all()
        close(found, expected, 1e-9)


def test_a_decoder_with_cross_attention_needs_a_memory():
    network = toy(translator())
    with pytest.raises(ClearheadError, match="this stack needs memory of an encoder"):
        network.hidden_states(some_tokens())
    with pytest.raises(ClearheadError, match="takes no memory"):
        toy(decoder()).hidden_states(some_tokens(), encoder_output=network.encode(some_tokens()))
