"""Worked examples of part C of the book: feed-forward, norms, logits, stacks and released models (C1 to C5).

for example in block_examples(): print(example.title)
"""

import re
from typing import Literal

import torch
from torch import Tensor

from clearhead.architecture import (
    FeedForward,
    GroupedAttention,
    Head,
    LatentAttention,
    Layer,
    LayerNorm,
    ModelConfig,
    RmsNorm,
)
from clearhead.costs import parameters_by_part
from clearhead.course.parts import Example, Panel, TextTable, inputs, numbered, tensor
from clearhead.families import preset
from clearhead.model import FeedForwardLayer, LogitHead, RecurrentConfig, RecurrentTranslator, Residual

_MODELS = {  # rows of the book's table and the preset of each
    "Transformer (2017)": "transformer-base",
    "GPT-1": "gpt1",
    "GPT-2": "gpt2",
    "GPT-3": "gpt3-175b",
    "Gopher": "gopher-280b",
    "PaLM": "palm-540b",
    "LLaMA": "llama-7b",
    "LLaMA-2": "llama-2-70b",
    "LLaMA-3": "llama-3.1-8b",
    "Grok-1": "grok-1",
    "Grok-2": "grok-2",
    "DeepSeek-v2": "deepseek-v2",
    "DeepSeek-v3": "deepseek-v3",
    "LLaMA-4": "llama-4-scout",
    "Qwen-3": "qwen3-0.6b",
    "Gemma 3": "gemma-3-1b",
}


def block_examples() -> list[Example]:
    """Compute the examples of C1 to C5."""
    return [_feed_forward(), _residual(), _logits(), _annotated(), _bottleneck(), _model_table()]


def _feed_forward() -> Example:
    given = {name: tensor(rows) for name, rows in inputs("feed_forward").items()}
    layer = FeedForwardLayer(FeedForward(width=4, activation="relu", bias=True), width=2).double()
    layer.up.weight.copy_(given["W_1"].T)
    layer.up.bias.copy_(given["b_1"])
    layer.down.weight.copy_(given["W_2"].T)
    layer.down.bias.copy_(given["b_2"])
    inner = layer.up(given["x"])
    panels = [
        Panel("x", given["x"], rows=numbered("token", 2)),
        Panel("W₁", given["W_1"]),
        Panel("b₁", given["b_1"][None]),
        Panel("xW₁ + b₁", inner),
        Panel("ReLU(xW₁ + b₁)", inner.relu()),
        Panel("W₂", given["W_2"]),
        Panel("b₂", given["b_2"][None]),
        Panel("output", layer(given["x"])),
    ]
    explanation = "d = 2 and d_ff = 4. Every token goes through the same two matrices, on its own."
    return Example("C1", "A feed-forward layer", explanation, panels)


def _residual() -> Example:
    x = tensor([[3.0, -1.0, 1.0, 5.0]])
    branch_output = tensor([[1.0, 1.0, -1.0, -1.0]])

    def through(placement: str) -> Tensor:
        layer = Layer(
            attention=GroupedAttention(num_heads=1, num_kv_heads=1, head_width=4),
            feed_forward=FeedForward(width=4, activation="relu"),
            norm=LayerNorm(epsilon=1e-5),
            placement="pre" if placement == "pre" else "post",
        )
        result: Tensor = Residual(layer, 4, dropout=0.0).double()(x, lambda _: branch_output)
        return result

    rows = ("x", "what the branch returns", "pre-norm: x + branch(norm(x))", "post-norm: norm(x + branch(x))")
    values = torch.cat((x, branch_output, through("pre"), through("post")))
    explanation = (
        "A branch that returns the second row, in both placements. Pre-norm leaves x itself in the sum; post-norm "
        "scales every sum to mean 0 and variance 1."
    )
    return Example("C1", "Residual connection and norm", explanation, [Panel("one token, d = 4", values, rows)])


def _logits() -> Example:
    given = inputs("logits")
    table, state = tensor(given["embeddings"]), tensor([given["state"]])
    logits = LogitHead(Head(tied=True), len(table), table.shape[1], table.shape[1])(state[None], table)[0]
    words = given["words"]
    panels = [
        Panel("embedding matrix", table, rows=words),
        Panel("first input: embedding·√d", table[:1] * table.shape[1] ** 0.5, rows=words[:1]),
        Panel("last hidden state x", state),
        Panel("logits = x·Eᵀ", logits, columns=words),
        Panel("softmax", logits.softmax(dim=-1), columns=words, kind="weights"),
    ]
    explanation = "The same matrix turns words into vectors at the start and a vector into scores of words at the end."
    return Example("C2", "From a vector to the next word", explanation, panels)


def _annotated() -> Example:
    config = preset("annotated-transformer")
    parts = parameters_by_part(config)
    assert config.encoder is not None
    assert config.decoder is not None
    layer = config.decoder.layers[0]
    assert isinstance(layer.attention, GroupedAttention)
    assert isinstance(layer.feed_forward, FeedForward)
    sizes = [
        ("N, encoder and decoder", f"{len(config.encoder.layers)} + {len(config.decoder.layers)}"),
        ("d_model", str(config.width)),
        ("d_ff", str(layer.feed_forward.width)),
        ("h", str(layer.attention.num_heads)),
        ("dropout", f"{config.dropout.residual:g}"),
        ("cross-attention in every decoder layer", str(all(each.cross_attention for each in config.decoder.layers))),
    ]
    rows = [(name, f"{count:,}") for name, count in parts.items()]
    rows.append(("total", f"{sum(parts.values()):,}"))
    explanation = "The preset `annotated-transformer`: its sizes, and where its parameters are."
    panels = [TextTable("sizes", ("setting", "value"), sizes), TextTable("parameters", ("part", "number"), rows)]
    return Example("C3", "The Annotated Transformer in numbers", explanation, panels)


def _bottleneck() -> Example:
    rows = []
    attentions: tuple[Literal["none", "dot_product"], ...] = ("none", "dot_product")
    for attention in attentions:
        config = RecurrentConfig(
            source_vocab_size=30,
            target_vocab_size=30,
            embedding_width=16,
            width=32,
            cell="gru",
            attention=attention,
            context=64,
        )
        network = RecurrentTranslator(config)
        for length in (4, 16, 64):
            output = network.encode(torch.zeros(1, length, dtype=torch.long))
            passed = network.initial_state(output).hidden.numel()
            passed += output.states.numel() if attention != "none" else 0
            rows.append(("with attention" if attention != "none" else "without", str(length), str(passed)))
    table = TextTable("numbers that the decoder receives", ("RNN", "source tokens", "numbers"), rows)
    explanation = (
        "A GRU with states of 32 numbers. Without attention, a text of any length has to fit into one state; with it, "
        "the decoder reads the state of every token."
    )
    return Example("C4", "The bottleneck in numbers", explanation, [table])


def _position_name(config: ModelConfig) -> str:
    """Return how a model encodes positions, from its config alone."""
    assert config.decoder is not None
    kinds = []
    if config.decoder.token_embedding.positions is not None:
        kinds.append(type(config.decoder.token_embedding.positions).__name__)
    for layer in config.decoder.layers:
        attention = layer.attention
        kind = "decoupled Rope" if isinstance(attention, LatentAttention) else type(attention.position).__name__
        if kind not in kinds and (kind != "NoPosition" or "Rope" in kinds):
            kinds.append(kind)
    return " and ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).lower() for kind in kinds).replace("rope", "RoPE")


def _model_table() -> Example:
    rows = []
    for model, name in _MODELS.items():
        config = preset(name)
        assert config.decoder is not None
        layer = config.decoder.layers[-1]
        attention = layer.attention
        shared = "latent" if isinstance(attention, LatentAttention) else f"{attention.num_kv_heads} of"
        norm = "RMS norm" if isinstance(layer.norm, RmsNorm) else "layer norm"
        rows.append(
            (
                model,
                name,
                _position_name(config),
                f"{len(config.decoder.layers)} × {config.width}",
                f"{shared} {attention.num_heads}",
                f"{norm}, {layer.placement}",
            )
        )
    columns = ("model", "preset", "positions", "layers × width", "key-value heads", "norm")
    explanation = (
        "Read from the configs of the presets: `clearhead show PRESET` prints one in full. Relative sinusoid: Gopher's "
        "form of B3. Latent 128: 128 heads share one latent vector (E4). Pre and post: the norms of C1. Sandwich: a "
        "norm before and after each branch. Parallel: both branches read the same norm and are added at once."
    )
    return Example("C5", "The models of the table", explanation, [TextTable("models", columns, rows)])
