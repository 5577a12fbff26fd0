"""The table of initial weights, row by row, by the statistics of what is drawn."""

import math
import re
import resource
from dataclasses import replace

import pytest
import torch

from clearhead.architecture import (
    Bidirectional,
    DeviationNorm,
    Embedding,
    Experts,
    FeedForward,
    Head,
    HeadNorm,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    NormalInitial,
    RelativeBuckets,
    RelativeSinusoid,
    RmsNorm,
    Router,
    SinusoidalPositions,
    Stack,
    XavierInitial,
)
from clearhead.families import preset
from clearhead.model import initialize
from clearhead.model.transformer import Transformer
from tests.model.toys import grouped, latent, layer

WIDTH, DEVIATION = 64, 0.05
EXPERTS = Experts(
    num_experts=8,
    num_chosen=2,
    expert=FeedForward(width=40, activation="silu", gated=True),
    router=Router(score="sigmoid", selection_bias=True),
    shared=FeedForward(width=40, activation="silu", gated=True, bias=True),
)
PLAIN = FeedForward(width=100, activation="relu", bias=True)


def everything(initial: NormalInitial | XavierInitial) -> ModelConfig:
    """An encoder and a decoder with every kind of weight in them."""
    embedding = Embedding(
        vocab_size=300,
        positions=LearnedPositions(num_positions=50),
        num_token_types=40,
        norm=LayerNorm(epsilon=1e-5),
    )
    across = grouped(pattern=Bidirectional(), output_bias=True)
    encoder = Stack(
        embedding=embedding,
        layers=(
            layer(replace(across, position=RelativeBuckets(bidirectional=True)), feed_forward=PLAIN),
            layer(latent(query_rank=48, latent_rank=40, pattern=Bidirectional()), feed_forward=EXPERTS),
        ),
        final_norm=RmsNorm(epsilon=1e-5, unit_offset=True),
    )
    normed = grouped(head_width=16, head_norm=HeadNorm(norm=RmsNorm(epsilon=1e-5)), position=RelativeSinusoid())
    decoder = Stack(
        embedding=replace(embedding, positions=SinusoidalPositions()),
        layers=(layer(normed, cross_attention=across, feed_forward=PLAIN, placement="sandwich"),),
        final_norm=DeviationNorm(epsilon=1e-5),
    )
    head = Head(tied=False, bias=True, transform=HeadTransform(activation="gelu", norm=LayerNorm(epsilon=1e-5)))
    return ModelConfig(
        width=WIDTH, context=50, encoder=encoder, decoder=decoder, head=head, pooler=True, initial=initial
    )


def drawn(initial: NormalInitial | XavierInitial) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(Transformer(everything(initial)).named_parameters())


def kind(name: str) -> str:
    """The row of the table that a parameter of `everything` belongs to."""
    if re.search(r"(^|[._])(final_|branch_|query_|key_|latent_)?norm\.", name):
        return "norms"
    if name.endswith("bias"):
        return "biases"
    if re.search(r"embedding\.(tokens|positions|types)|relative_bias|^head\.weight", name):
        return "embeddings"
    if re.search(r"\.output\.weight|feed_forward\.(shared\.)?down", name):
        return "branch ends"
    return "matrices"


def test_the_table_is_the_modules_docstring():
    rows = re.findall(r"^([a-z ]+?)  +\S", initialize.__doc__, re.MULTILINE)
    assert rows == ["norms", "biases", "embeddings", "matrices", "branch ends"]
    kinds = [kind(name) for name in drawn(NormalInitial())]
    assert set(kinds) == set(rows)


@pytest.mark.parametrize("initial", [NormalInitial(), XavierInitial()], ids=["normal", "xavier"])
def test_norms_are_the_identity_and_biases_are_zero(initial):
    found = drawn(initial)
    for name, parameter in found.items():
        if kind(name) == "norms":
            one = 0.0 if name.endswith("bias") or name == "encoder.final_norm.weight" else 1.0
            assert torch.equal(parameter, torch.full_like(parameter, one)), name
        elif kind(name) == "biases":
            assert not parameter.any(), name
    assert {name.rpartition(".")[2] for name in found if kind(name) == "biases"} == {
        "bias",
        "content_bias",
        "distance_bias",
    }


def assert_normal(parameter: torch.Tensor, deviation: float, name: str) -> None:
    """Mean and deviation within four standard errors, and the share beyond one deviation of a normal draw."""
    count = parameter.numel()
    assert abs(parameter.mean().item()) < 4 * deviation / math.sqrt(count), name
    assert abs(parameter.std().item() / deviation - 1) < 4 / math.sqrt(2 * count), name
    beyond = (parameter.abs() > deviation).float().mean().item()
    assert abs(beyond - 0.3173) < 4 * math.sqrt(0.3173 * 0.6827 / count), name


@pytest.mark.parametrize("residual_scaled", [False, True])
def test_normal_weights_have_the_configured_deviation(residual_scaled):
    """Branch ends are divided by √(2L), L = 3, where residual_scaled."""
    for name, parameter in drawn(NormalInitial(deviation=DEVIATION, residual_scaled=residual_scaled)).items():
        if kind(name) in ("embeddings", "matrices"):
            assert_normal(parameter, DEVIATION, name)
        elif kind(name) == "branch ends":
            assert_normal(parameter, DEVIATION / math.sqrt(6) if residual_scaled else DEVIATION, name)


def test_branch_ends_are_all_that_write_into_the_residual():
    """One for each branch: attention, cross-attention, feed-forward, each expert stack and its shared expert."""
    ends = sorted(name for name in drawn(NormalInitial()) if kind(name) == "branch ends")
    assert ends == [
        "decoder.layers.0.attention.output.weight",
        "decoder.layers.0.cross_attention.output.weight",
        "decoder.layers.0.feed_forward.down.weight",
        "encoder.layers.0.attention.output.weight",
        "encoder.layers.0.feed_forward.down.weight",
        "encoder.layers.1.attention.output.weight",
        "encoder.layers.1.feed_forward.down",
        "encoder.layers.1.feed_forward.shared.down.weight",
    ]


def test_xavier_matrices_are_uniform_within_their_bound():
    for name, parameter in drawn(XavierInitial()).items():
        if kind(name) == "embeddings":
            assert_normal(parameter, WIDTH**-0.5, name)
        elif kind(name) in ("matrices", "branch ends"):
            bound = math.sqrt(6 / (parameter.shape[-2] + parameter.shape[-1]))  # of each expert for itself
            assert 0.95 * bound < parameter.abs().max() <= bound, name
            count = parameter.numel()
            assert abs(parameter.var().item() / (bound**2 / 3) - 1) < 4 * math.sqrt(0.8 / count), name


def test_shared_and_tied_tables_are_drawn_once():
    config = everything(NormalInitial())
    shared = replace(
        config,
        share_embeddings=True,
        head=Head(),
        decoder=replace(config.decoder, embedding=config.encoder.embedding),
    )
    network = Transformer(shared)
    names = [name for name, _ in network.named_parameters() if name.endswith("embedding.tokens.weight")]
    assert names == ["encoder.embedding.tokens.weight"]
    assert network.head.weight is None


def test_selection_bias_starts_at_zero():
    buffers = dict(Transformer(everything(NormalInitial())).named_buffers())
    assert list(buffers) == ["encoder.layers.1.feed_forward.router.selection_bias"]
    assert not next(iter(buffers.values())).any()


def test_on_the_meta_device_the_largest_model_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        network = Transformer(preset("llama-3.1-405b"))
    grown_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert all(parameter.is_meta for parameter in network.parameters())
    assert sum(parameter.numel() for parameter in network.parameters()) > 4e11
    assert grown_kilobytes < 200_000
