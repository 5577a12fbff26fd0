"""Small networks, their training loop and a text, for all studies.

network = build(toy_decoder(vocab_size=4, width=32, position=Rope()), seed=0); train(network, loss_of, num_steps=100)
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.api import create
from clearhead.architecture import (
    AttentionPattern,
    Causal,
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    ModelConfig,
    NoPosition,
    NormalInitial,
    Position,
    RmsNorm,
    SinusoidalPositions,
    Stack,
)
from clearhead.errors import ClearheadError
from clearhead.model import RecurrentConfig, RecurrentTranslator, Transformer

_NORM, _NO_POSITION, _CAUSAL = RmsNorm(epsilon=1e-6), NoPosition(), Causal()


def toy_decoder(
    *,
    vocab_size: int,
    width: int,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    context: int = 64,
    position: Position | SinusoidalPositions | tuple[Position, ...] = _NO_POSITION,
    pattern: AttentionPattern = _CAUSAL,
    placement: Literal["pre", "post"] = "pre",
) -> ModelConfig:
    """Return a small decoder.

    position: that of every layer, or of each layer, or sinusoids, which are added to the embeddings.
    """
    added = position if isinstance(position, SinusoidalPositions) else None
    if isinstance(position, SinusoidalPositions):
        position = _NO_POSITION
    layers = [
        Layer(
            attention=GroupedAttention(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads or num_heads,
                head_width=width // num_heads,
                position=each,
                pattern=pattern,
            ),
            feed_forward=FeedForward(width=4 * width, activation="gelu"),
            norm=_NORM,
            placement=placement,
        )
        for each in (position if isinstance(position, tuple) else (position,) * num_layers)
    ]
    # At these widths the usual deviation of 0.02 would be too small: here every matrix keeps the size of its input.
    initial = NormalInitial(deviation=width**-0.5, residual_scaled=True)
    embedding = Embedding(vocab_size=vocab_size, positions=added, scale=math.sqrt(width))
    stack = Stack(embedding=embedding, layers=tuple(layers), final_norm=_NORM)
    return ModelConfig(width=width, context=context, decoder=stack, head=Head(tied=False), initial=initial)


def toy_recurrent(
    *,
    vocab_size: int,
    width: int,
    cell: Literal["tanh", "gru", "lstm"],
    embedding_width: int | None = None,
    attends: bool = False,
    bidirectional: bool = False,
) -> RecurrentConfig:
    """Return a small recurrent encoder-decoder, whose decoder attends to the states of the encoder or does not."""
    return RecurrentConfig(
        source_vocab_size=vocab_size,
        target_vocab_size=vocab_size,
        embedding_width=embedding_width or width,
        width=width,
        cell=cell,
        attention="dot_product" if attends else "none",
        bidirectional=bidirectional,
        context=64,
    )


def build(config: ModelConfig, seed: int) -> Transformer:
    """Return a new network with random weights, in training mode."""
    return create(config, seed=seed).network.train()


def build_recurrent(config: RecurrentConfig, seed: int) -> RecurrentTranslator:
    """Return a new recurrent encoder-decoder with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RecurrentTranslator(config)


def train(
    network: nn.Module, loss_of: Callable[[int], Tensor], *, num_steps: int, learning_rate: float = 3e-3
) -> list[float]:
    """Minimize `loss_of(step)` with AdamW; return the losses. The rate rises for a tenth of the steps, then falls to 0.

    Afterwards the network is in evaluation mode.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    num_warmup, losses = max(num_steps // 10, 1), []
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min((step + 1) / num_warmup, 1 - step / num_steps)
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    network.eval()
    return losses


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of logits (B, T, V) and targets (B, T) in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_generator(*key: int) -> torch.Generator:
    """Return a random generator for a key of several numbers, such as a seed and a step."""
    seed = 0
    for number in key:
        seed = (seed * 1_000_003 + number + 1) % 2**31
    return torch.Generator().manual_seed(seed)


@cache
def english_text() -> tuple[Tensor, int]:
    """Return an English text as character ids (M,), and the size of its alphabet.

    The text is the language reference that comes with Python, about 460,000 characters, so nothing is downloaded.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ClearheadError(
            "this study reads Python's own help texts, which this Python lacks; install its standard library completely"
        ) from None
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


def text_rows(text: Tensor, num_rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return random pieces (num_rows, length + 1) of a text, inputs and targets together."""
    starts = torch.randint(0, len(text) - length - 1, (num_rows, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]
