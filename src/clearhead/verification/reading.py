"""Checks of one forward: neither neighbours, padding, kernel nor compiler may change what a row gives.

compared = padded_left(subject); compared.difference
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from clearhead.architecture import LatentAttention, SinusoidalPositions
from clearhead.errors import ClearheadError
from clearhead.model import AttentionKernel, fused_attention, reference_attention
from clearhead.verification.finding import Comparison, Skipped
from clearhead.verification.subject import Side, Subject, lengths_of


def prefix_alone(subject: Subject) -> Comparison:
    """Causality: what comes later changes nothing before. With it one forward stands for all its prefixes."""
    if subject.config.decoder is None:
        raise Skipped("an encoder looks both ways")
    tokens, whole = subject.tokens(), subject.expected[0]
    lengths = (1, tokens.shape[1] // 3, tokens.shape[1] - 1)
    pairs = [
        (subject.run(tokens[:, :length], encoder_output=subject.encoder_output()), whole[:, :length])
        for length in lengths
    ]
    return Comparison(pairs, f"the first {', '.join(map(str, lengths))} of {tokens.shape[1]} tokens")


def batched(subject: Subject) -> Comparison:
    """Rows of one length; the sources of an encoder-decoder differ in length and are padded on the right."""
    length = min(map(len, subject.rows))
    tokens = torch.cat([subject.tokens(row)[:, :length] for row in range(len(subject.rows))])
    together = subject.run(tokens, encoder_output=subject.encoder_output(None))
    pairs = [
        (together[row, None], subject.run(tokens[row, None], encoder_output=subject.encoder_output(row)))
        for row in range(len(tokens))
    ]
    return Comparison(pairs, f"{len(tokens)} rows of {length} tokens")


def padded_left(subject: Subject) -> Comparison:
    return padded(subject, "left")


def padded_right(subject: Subject) -> Comparison:
    return padded(subject, "right")


def padded(subject: Subject, side: Side) -> Comparison:
    pairs = list(zip(padded_rows(subject, side), subject.expected, strict=True))
    return Comparison(pairs, f"rows of {lengths_of(subject.rows)} tokens")


def padded_rows(subject: Subject, side: Side, **options: Any) -> list[Tensor]:
    """Logits (1, T, V) of each row of a padded batch, where its tokens are real."""
    tokens, mask = subject.padded(subject.rows, side)
    together = subject.run(tokens, mask, subject.encoder_output(None, side, **options), **options)
    return [logits[real][None] for logits, real in zip(together, mask, strict=True)]


def fused_kernel(subject: Subject) -> Comparison:
    """Both with the mask that the kernel makes itself and with one that is given."""

    def logits(kernel: AttentionKernel) -> list[Tensor]:
        alone = subject.run(subject.tokens(), encoder_output=subject.encoder_output(kernel=kernel), kernel=kernel)
        return [alone, *padded_rows(subject, "left", kernel=kernel)]

    return Comparison(
        list(zip(logits(fused_attention), logits(reference_attention), strict=True)), "unpadded and padded"
    )


def absorbed_latent(subject: Subject) -> Comparison:
    if not any(isinstance(layer.attention, LatentAttention) for layer in subject.config.output_stack.layers):
        raise Skipped("no layer has latent attention")
    found = subject.run(subject.tokens(), absorb=True)
    return Comparison([(found, subject.expected[0])], "queries moved to the latent")


def remembered_source(subject: Subject) -> Comparison:
    """Keys and values of the cross-attention made once for all steps."""
    encoder_output = subject.encoder_output()
    if encoder_output is None:
        raise Skipped("there is no encoder to remember")
    found = subject.run(subject.tokens(), encoder_output=subject.network.precompute_cross_attention(encoder_output))
    return Comparison([(found, subject.expected[0])], f"a source of {len(subject.sources[0])} tokens")


def compiled(subject: Subject) -> Comparison:
    if not subject.compiles:
        raise Skipped("takes a minute; --compile asks for it")
    network = torch.compile(subject.network)
    inputs = [subject.tokens()]
    if subject.sources:
        inputs.insert(0, torch.tensor([subject.sources[0]], device=subject.device))
    return Comparison([(network(*inputs), subject.expected[0])], "torch.compile, inductor")


def in_transformers(subject: Subject) -> Comparison:
    """Through the disk: the model saved as a Hugging Face folder, and read by the class its config names."""
    if find_spec("transformers") is None:
        raise Skipped("transformers is not installed; pip install transformers")
    if subject.dtype == torch.float64:
        raise Skipped("transformers computes norms and positions in float32")
    positions, context = subject.config.output_stack.embedding.positions, subject.config.context
    if isinstance(positions, SinusoidalPositions) and len(subject.rows[0]) > context:
        raise Skipped(f"transformers has a table of {context} sinusoids; --length makes the texts shorter")
    with TemporaryDirectory() as folder:
        try:
            subject.model.save(folder, format="huggingface")
        except ClearheadError as reason:
            raise Skipped(str(reason)) from None
        name, theirs = read_by_transformers(subject, Path(folder))
    return Comparison([(subject.expected[0], theirs)], name)


def read_by_transformers(subject: Subject, folder: Path) -> tuple[str, Tensor]:
    transformers = import_module("transformers")
    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    with without_bars():
        network = getattr(transformers, name).from_pretrained(folder, dtype=subject.dtype, attn_implementation="eager")
    network = network.to(subject.device).eval()
    if subject.sources:
        source = torch.tensor([subject.sources[0]], device=subject.device)
        found = network(input_ids=source, decoder_input_ids=subject.tokens())
    else:
        found = network(input_ids=subject.tokens())
    return name, found.logits if "logits" in found else found.last_hidden_state


@contextmanager
def without_bars() -> Iterator[None]:
    logging = import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
