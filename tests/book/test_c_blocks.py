"""Part C of the book, blocks and stacks, statement by statement: C1 to C4."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import (
    Bidirectional,
    Causal,
    Dropout,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    LayerNorm,
    Rope,
    SinusoidalPositions,
    XavierInitial,
)
from clearhead.families import preset
from clearhead.model.attend import fused_attention
from clearhead.model.block import Block
from clearhead.model.feed_forward import ACTIVATIONS, FeedForwardLayer
from clearhead.model.masks import Mask
from clearhead.model.positions import sinusoids
from clearhead.model.transformer import Transformer
from tests.model.toys import (
    VOCAB,
    WIDTH,
    assert_close,
    attention_context,
    decoder,
    encoder,
    grouped,
    layer,
    redraw,
    some_tokens,
    toy,
    translator,
)
from tests.toy_presets import shrink


def random_input(seed: int = 0, length: int = 6) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_block(config: Layer) -> Block:
    """Return a block with random weights in float64."""
    block = Block(config, WIDTH, Dropout())
    redraw(block)
    return block.double().eval()


# --- C1

FORMULAS = {
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
}


def test_c1_there_is_a_formula_for_every_activation():
    assert ACTIVATIONS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("activation", FORMULAS)
def test_c1_feed_forward_is_f_of_x_w1_plus_b1_times_w2_plus_b2(activation):
    module = FeedForwardLayer(FeedForward(width=40, activation=activation, bias=True), WIDTH)
    redraw(module)
    module.double()
    x = random_input()
    w1, b1, w2, b2 = module.up.weight.T, module.up.bias, module.down.weight.T, module.down.bias
    assert_close(module(x), FORMULAS[activation](x @ w1 + b1) @ w2 + b2)


def test_c1_swiglu_multiplies_a_gate_by_the_other_projection():
    module = FeedForwardLayer(FeedForward(width=40, activation="silu", gated=True), WIDTH)
    redraw(module)
    module.double()
    x = random_input()
    gate, up, down = module.gate.weight.T, module.up.weight.T, module.down.weight.T
    assert_close(module(x), (functional.silu(x @ gate) * (x @ up)) @ down)
    assert isinstance(preset("llama-7b").decoder.layers[0].feed_forward, FeedForward)
    assert preset("llama-7b").decoder.layers[0].feed_forward.gated
    assert preset("llama-7b").decoder.layers[0].feed_forward.activation == "silu"


def block_by_hand(block: Block, x: Tensor, placement: str) -> Tensor:
    """Compute a block by the equations of its placement, written as in the papers."""
    context = attention_context(Mask(causal=True), fused_attention, x.shape[1])

    def attend(h: Tensor) -> Tensor:
        return block.attention(h, context)

    norm1, feed_forward = block.attention_residual.norm, block.feed_forward
    if placement == "parallel":
        return x + attend(norm1(x)) + feed_forward(norm1(x))
    norm2 = block.feed_forward_residual.norm
    if placement == "post":  # LayerNorm(x + Sublayer(x))
        y = norm1(x + attend(x))
        return norm2(y + feed_forward(y))
    if placement == "pre":  # x + Sublayer(LayerNorm(x)), the SublayerConnection
        y = x + attend(norm1(x))
        return y + feed_forward(norm2(y))
    branch_norm1, branch_norm2 = block.attention_residual.branch_norm, block.feed_forward_residual.branch_norm
    y = x + branch_norm1(attend(norm1(x)))
    return y + branch_norm2(feed_forward(norm2(y)))


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "parallel"])
def test_c1_a_block_equals_its_equations(placement):
    block, x = random_block(layer(grouped(), norm=LayerNorm(epsilon=1e-3), placement=placement)), random_input()
    assert_close(block(x, attention_context(Mask(causal=True), fused_attention, 6)), block_by_hand(block, x, placement))


@torch.no_grad()
def copy_into_torch(block: Block, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> None:
    """Copy the weights of a block into a layer of torch."""
    attentions = [(block.attention, theirs.self_attn)]
    norms = [block.attention_residual.norm, block.feed_forward_residual.norm]
    if isinstance(theirs, nn.TransformerDecoderLayer):
        attentions.append((block.cross_attention, theirs.multihead_attn))
        norms.insert(1, block.cross_attention_residual.norm)
    for own, other in attentions:
        other.in_proj_weight.copy_(torch.cat([own.query.weight, own.key.weight, own.value.weight]))
        other.in_proj_bias.copy_(torch.cat([own.query.bias, own.key.bias, own.value.bias]))
        other.out_proj.load_state_dict(own.output.state_dict())
    theirs.linear1.load_state_dict(block.feed_forward.up.state_dict())
    theirs.linear2.load_state_dict(block.feed_forward.down.state_dict())
    for number, norm in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())


def torch_layer_config(**changes: object) -> Layer:
    """Return the config of a block that torch's layers can compute."""
    attention = GroupedAttention(num_heads=4, num_kv_heads=4, head_width=4, input_bias=True, output_bias=True)
    return layer(
        attention,
        feed_forward=FeedForward(width=40, activation="relu", bias=True),
        norm=LayerNorm(epsilon=1e-3),
        **changes,
    )


TORCH_OPTIONS = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 40, "dropout": 0.0, "layer_norm_eps": 1e-3}


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_c1_block_equals_the_encoder_layer_of_torch(placement):
    block = random_block(torch_layer_config(placement=placement))
    theirs = (
        nn.TransformerEncoderLayer(**TORCH_OPTIONS, batch_first=True, norm_first=placement == "pre").double().eval()
    )
    copy_into_torch(block, theirs)
    x = random_input()
    assert_close(block(x, attention_context(Mask(), fused_attention, 6)), theirs(x))


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_c1_block_equals_the_decoder_layer_of_torch(placement):
    cross_attention = replace(torch_layer_config().attention, pattern=Bidirectional())
    block = random_block(torch_layer_config(placement=placement, cross_attention=cross_attention))
    theirs = (
        nn.TransformerDecoderLayer(**TORCH_OPTIONS, batch_first=True, norm_first=placement == "pre").double().eval()
    )
    copy_into_torch(block, theirs)
    x, encoder_output = random_input(), random_input(seed=1, length=9)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    found = block(
        x,
        attention_context(Mask(causal=True), fused_attention, 6),
        encoder_output,
        attention_context(Mask(), fused_attention, 6),
    )
    assert_close(found, theirs(x, encoder_output, tgt_mask=causal))


def test_c1_the_residual_connection_passes_the_input_through_unchanged():
    block, x = random_block(layer(grouped())), random_input()
    with torch.no_grad():
        for linear in (block.attention.output, block.feed_forward.down):
            for parameter in linear.parameters():
                parameter.zero_()
    assert torch.equal(block(x, attention_context(Mask(), fused_attention, 6)), x)


# --- C2


def test_c2_language_model_is_embedding_times_root_d_positions_blocks_and_the_table_again():
    config = decoder(SinusoidalPositions())
    embedding = replace(config.decoder.embedding, scale=math.sqrt(WIDTH))
    network = toy(replace(config, decoder=replace(config.decoder, embedding=embedding)))
    tokens, table = some_tokens(), network.decoder.embedding.tokens.weight
    x = table[tokens] * math.sqrt(WIDTH) + sinusoids(torch.arange(8), WIDTH, SinusoidalPositions(), torch.float64)
    for block in network.decoder.layers:
        x = block_by_hand(block, x, "pre")
    logits = network.decoder.final_norm(x) @ table.T
    assert_close(network(tokens), logits)
    assert_close(network(tokens).softmax(dim=-1).sum(dim=-1), torch.ones(2, 8, dtype=torch.float64))


def test_c2_a_tied_head_has_no_matrix_of_its_own():
    tied = toy(decoder())
    untied = toy(replace(decoder(), head=Head(tied=False)))
    assert untied.state_dict().keys() - tied.state_dict().keys() == {"head.weight"}
    assert untied.head.weight.shape == (VOCAB, WIDTH)
    hidden = tied.hidden_states(some_tokens())
    assert torch.equal(tied(some_tokens()), hidden @ tied.decoder.embedding.tokens.weight.T)


def test_c2_the_tied_table_gets_gradients_from_the_head():
    """Token 7 is not in the input, but its row gets a gradient because it is a possible output."""
    network, tokens = toy(decoder()), torch.tensor([[1, 2, 3]])
    network(tokens).logsumexp(dim=-1).sum().backward()
    assert network.decoder.embedding.tokens.weight.grad[7].abs().min() > 0


# --- C3


def test_c3_the_encoder_is_bidirectional_and_the_decoder_causal():
    network = toy(translator())
    source, target = some_tokens(1, 6), some_tokens(1, 5, seed=2)
    last_changed, target_changed = source.clone(), target.clone()
    last_changed[0, -1] = (source[0, -1] + 1) % VOCAB
    target_changed[0, -1] = (target[0, -1] + 1) % VOCAB
    encoder_output, logits = network.encode(source).states, network(source, target)
    assert ((network.encode(last_changed).states - encoder_output).abs().amax(dim=-1) > 1e-3).all()
    assert ((network(last_changed, target) - logits).abs().amax(dim=-1) > 1e-4).all()
    after = network(source, target_changed)
    assert_close(after[:, :-1], logits[:, :-1])
    assert (after[:, -1] - logits[:, -1]).abs().max() > 1e-2


def test_c3_every_decoder_layer_attends_to_the_last_encoder_states():
    network, attended = toy(translator()), []
    for block in network.decoder.layers:
        block.cross_attention.register_forward_pre_hook(
            lambda module, args, kwargs: attended.append(kwargs["encoder_output"]), with_kwargs=True
        )
    encoder_output = network.encode(some_tokens(1, 6))
    network.decode(some_tokens(1, 5), encoder_output)
    assert len(attended) == len(network.decoder.layers) == 2
    assert all(states is encoder_output.states for states in attended)
    assert torch.equal(encoder_output.states, network.encoder(some_tokens(1, 6)))


def test_c3_encode_then_decode_equals_forward():
    network, source, target = toy(translator()), some_tokens(2, 6), some_tokens(2, 5)
    assert torch.equal(network.decode(target, network.encode(source)), network(source, target))


def test_c3_an_encoder_decoder_equals_that_of_torch():
    """Post-norm, embeddings times √d and sinusoids, against torch's layers without a final norm."""
    small = shrink(preset("transformer-base"))
    biased = replace(small.encoder.layers[0].attention, input_bias=True, output_bias=True)
    encoding = replace(small.encoder.layers[0], attention=biased)
    decoding = replace(encoding, attention=replace(biased, pattern=Causal()), cross_attention=biased)
    small = replace(
        small,
        encoder=replace(small.encoder, layers=(encoding,) * 2),
        decoder=replace(small.decoder, layers=(decoding,) * 2),
    )
    network = toy(small)
    sizes = TORCH_OPTIONS | {"dim_feedforward": encoding.feed_forward.width, "layer_norm_eps": encoding.norm.epsilon}
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    source, target = some_tokens(2, 6), some_tokens(2, 5, seed=2)
    table = network.encoder.embedding.tokens.weight
    assert network.decoder.embedding.tokens.weight is table
    encoder_output, x = (
        table[tokens] * math.sqrt(WIDTH)
        + sinusoids(torch.arange(tokens.shape[1]), WIDTH, SinusoidalPositions(), torch.float64)
        for tokens in (source, target)
    )
    for block in network.encoder.layers:
        theirs = nn.TransformerEncoderLayer(**sizes, batch_first=True).double().eval()
        copy_into_torch(block, theirs)
        encoder_output = theirs(encoder_output)
    for block in network.decoder.layers:
        theirs = nn.TransformerDecoderLayer(**sizes, batch_first=True).double().eval()
        copy_into_torch(block, theirs)
        x = theirs(x, encoder_output, tgt_mask=causal)
    assert_close(network(source, target), x @ table.T)


@pytest.mark.parametrize("name", ["transformer-base", "annotated-transformer"])
def test_c3_presets_have_the_sizes_of_make_model(name):
    """make_model(N=6, d_model=512, d_ff=2048, h=8, dropout=0.1)."""
    config = preset(name)
    assert config.width == 512
    assert config.dropout.residual == config.dropout.embedding == 0.1
    assert isinstance(config.initial, XavierInitial)
    for stack in (config.encoder, config.decoder):
        assert len(stack.layers) == 6
        assert stack.embedding.positions == SinusoidalPositions()
        assert stack.embedding.scale == pytest.approx(math.sqrt(512))
        assert all(layer.feed_forward.width == 2048 for layer in stack.layers)
        assert all((layer.attention.num_heads, layer.attention.head_width) == (8, 64) for layer in stack.layers)


def test_c3_every_parameter_with_more_than_one_dimension_is_xavier_uniform():
    """Also the two token tables and the head, as in the code of make_model."""
    config = preset("annotated-transformer")
    one_layer = {
        side: replace(stack, layers=stack.layers[:1], embedding=replace(stack.embedding, vocab_size=50))
        for side, stack in (("encoder", config.encoder), ("decoder", config.decoder))
    }
    torch.manual_seed(0)
    network = Transformer(replace(config, **one_layer))
    matrices = {name: parameter for name, parameter in network.named_parameters() if parameter.ndim > 1}
    assert len(matrices) == 6 + 10 + 3  # four in an attention, two in a feed-forward; two tables and the head
    for matrix in matrices.values():
        bound = math.sqrt(6 / sum(matrix.shape))
        assert 0.99 * bound < matrix.abs().max() <= bound
        assert matrix.var().item() == pytest.approx(bound**2 / 3, rel=0.03)  # variance of a uniform distribution


# --- C4


def test_c4_every_output_of_an_encoder_depends_on_every_input():
    network, inputs = toy(encoder(Rope())), []
    network.encoder.embedding.register_forward_hook(lambda *call: inputs.append(call[-1]))
    states = network(some_tokens(1, 6))
    for position in range(6):
        (gradient,) = torch.autograd.grad(states[0, position].sum(), inputs, retain_graph=True)
        assert (gradient[0].abs().amax(dim=-1) > 0).all()


def test_c4_the_pooler_of_an_encoder_gives_one_vector_per_sequence():
    network = toy(replace(encoder(Rope()), pooler=True))
    states = network(some_tokens())
    assert_close(network.pool(states), torch.tanh(states[:, 0] @ network.pooler.weight.T + network.pooler.bias))
