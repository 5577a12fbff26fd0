"""Checks of one forward: neither neighbours, padding, kernel nor compiler may change what a row gives.

compared = padded_left(subject); compared.difference
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.attend import fused, reference
from clearhead.model.config import LatentAttention
from clearhead.verification.finding import Comparison, Skipped
from clearhead.verification.subject import Side, Subject

Pair = tuple[Tensor, Tensor]


def prefix_alone(subject: Subject) -> Comparison:
    """Causality: what comes later changes nothing before. With it one forward stands for all its prefixes."""
    if subject.config.decoder is None:
        raise Skipped("an encoder looks both ways")
    tokens, whole = subject.tokens(), subject.expected[0]
    lengths = (1, tokens.shape[1] // 3, tokens.shape[1] - 1)
    pairs = [(subject.run(tokens[:, :length], memory=subject.memory()), whole[:, :length]) for length in lengths]
    return Comparison(pairs, f"the first {', '.join(map(str, lengths))} of {tokens.shape[1]} tokens")


def batched(subject: Subject) -> Comparison:
    """Rows of one length; the sources of an encoder-decoder differ in length and are padded on the right."""
    length = min(map(len, subject.rows))
    tokens = torch.cat([subject.tokens(row)[:, :length] for row in range(len(subject.rows))])
    together = subject.run(tokens, memory=subject.memory(None))
    pairs = [
        (together[row, None], subject.run(tokens[row, None], memory=subject.memory(row))) for row in range(len(tokens))
    ]
    return Comparison(pairs, f"{len(tokens)} rows of {length} tokens")


def padded_left(subject: Subject) -> Comparison:
    return padded(subject, "left")


def padded_right(subject: Subject) -> Comparison:
    return padded(subject, "right")


def padded(subject: Subject, side: Side) -> Comparison:
    return Comparison(list(padded_pairs(subject, side)), f"rows of {lengths_of(subject.rows)} tokens")


def padded_pairs(subject: Subject, side: Side, **options: Any) -> Iterator[Pair]:
    """Each row of a padded batch, where its tokens are real, and the same row alone."""
    tokens, mask = subject.padded(subject.rows, side)
    together = subject.run(tokens, mask, subject.memory(None, side, **options), **options)
    for row, alone in enumerate(subject.expected):
        yield together[row][mask[row]][None], alone


def lengths_of(rows: Any) -> str:
    return ", ".join(str(len(row)) for row in rows)


def fused_kernel(subject: Subject) -> Comparison:
    """Both with the mask that the kernel makes itself and with one that is given."""
    tokens = subject.tokens()
    ways = [subject.run(tokens, memory=subject.memory(kernel=kernel), kernel=kernel) for kernel in (fused, reference)]
    given = [list(padded_pairs(subject, "left", kernel=kernel)) for kernel in (fused, reference)]
    masked = [(one, other) for (one, _), (other, _) in zip(*given, strict=True)]
    return Comparison([(ways[0], ways[1]), *masked], "scaled_dot_product_attention and softmax(QKᵀ)V in steps")


def absorbed_latent(subject: Subject) -> Comparison:
    if not any(isinstance(layer.attention, LatentAttention) for layer in subject.config.output_stack.layers):
        raise Skipped("no layer has latent attention")
    return Comparison(
        [(subject.run(subject.tokens(), absorb=True), subject.expected[0])], "queries moved to the latent"
    )


def remembered_source(subject: Subject) -> Comparison:
    """Keys and values of the cross-attention made once for all steps."""
    memory = subject.memory()
    if memory is None:
        raise Skipped("there is no encoder to remember")
    tokens = subject.tokens()
    return Comparison(
        [(subject.run(tokens, memory=subject.network.remember(memory)), subject.expected[0])],
        f"a source of {len(subject.sources[0])} tokens",
    )


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
        raise Skipped("transformers is not installed")
    with TemporaryDirectory() as folder:
        try:
            subject.model.save(folder, format="huggingface")
        except ClearheadError as reason:
            raise Skipped(str(reason)) from None
        name, theirs = read_by_transformers(subject, Path(folder))
    return Comparison([(subject.expected[0], theirs)], name)


def read_by_transformers(subject: Subject, folder: Path) -> tuple[str, Tensor]:
    import transformers

    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    their_class = getattr(transformers, name)
    network = their_class.from_pretrained(folder, dtype=subject.dtype, attn_implementation="eager")
    network = network.to(subject.device).eval()
    if subject.sources:
        source = torch.tensor([subject.sources[0]], device=subject.device)
        found = network(input_ids=source, decoder_input_ids=subject.tokens())
    else:
        found = network(input_ids=subject.tokens())
    return name, found.logits if "logits" in found else found.last_hidden_state
