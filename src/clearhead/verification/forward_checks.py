"""Checks of one forward pass: other sequences, padding, the attention kernel and the compiler must not change logits.

comparison = left_padding(case); comparison.difference
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
from clearhead.backends import is_packed
from clearhead.errors import ClearheadError
from clearhead.model import AttentionKernel, fused_attention, reference_attention
from clearhead.verification.case import Side, VerificationCase, list_lengths
from clearhead.verification.results import CheckSkipped, LogitComparison


def prefixes(case: VerificationCase) -> LogitComparison:
    """Check causality: later tokens do not change earlier logits, so one forward pass gives those of all prefixes."""
    if case.config.decoder is None:
        raise CheckSkipped("an encoder attends to later tokens too")
    tokens, expected = case.tokens(), case.expected[0]
    lengths = (1, tokens.shape[1] // 3, tokens.shape[1] - 1)
    pairs = [
        (case.compute_logits(tokens[:, :length], encoder_output=case.encoder_output()), expected[:, :length])
        for length in lengths
    ]
    return LogitComparison(pairs, f"the first {', '.join(map(str, lengths))} of {tokens.shape[1]} tokens")


def batch(case: VerificationCase) -> LogitComparison:
    """Check a batch of equal lengths; the sources of an encoder-decoder differ in length and are padded right."""
    length = min(map(len, case.sequences))
    tokens = torch.cat([case.tokens(index)[:, :length] for index in range(len(case.sequences))])
    batched = case.compute_logits(tokens, encoder_output=case.encoder_output(None))
    pairs = [
        (batched[index, None], case.compute_logits(tokens[index, None], encoder_output=case.encoder_output(index)))
        for index in range(len(tokens))
    ]
    return LogitComparison(pairs, f"{len(tokens)} sequences of {length} tokens")


def left_padding(case: VerificationCase) -> LogitComparison:
    """Check a batch of different lengths, padded on the left."""
    return padding(case, "left")


def right_padding(case: VerificationCase) -> LogitComparison:
    """Check a batch of different lengths, padded on the right."""
    return padding(case, "right")


def padding(case: VerificationCase, side: Side) -> LogitComparison:
    """Check a batch of different lengths, padded on one side."""
    pairs = list(zip(_padded_logits(case, side), case.expected, strict=True))
    return LogitComparison(pairs, f"sequences of {list_lengths(case.sequences)} tokens")


def _padded_logits(case: VerificationCase, side: Side, **options: Any) -> list[Tensor]:
    """Return the logits (1, T, V) of the real tokens of each sequence in a padded batch."""
    tokens, mask = case.pad(case.sequences, side)
    batched = case.compute_logits(tokens, mask, case.encoder_output(None, side, **options), **options)
    return [logits[is_real][None] for logits, is_real in zip(batched, mask, strict=True)]


def fused_attention_kernel(case: VerificationCase) -> LogitComparison:
    """Check the fused kernel with its own causal mask (one sequence) and with an explicit mask (a padded batch)."""

    def logits(kernel: AttentionKernel) -> list[Tensor]:
        encoder_output = case.encoder_output(kernel=kernel)
        single = case.compute_logits(case.tokens(), encoder_output=encoder_output, kernel=kernel)
        return [single, *_padded_logits(case, "left", kernel=kernel)]

    pairs = list(zip(logits(fused_attention), logits(reference_attention), strict=True))
    return LogitComparison(pairs, "without and with padding")


def absorbed_latent_attention(case: VerificationCase) -> LogitComparison:
    """Check latent attention that works on the cached latents instead of unfolding keys and values."""
    if not any(isinstance(layer.attention, LatentAttention) for layer in case.config.output_stack.layers):
        raise CheckSkipped("no layer has latent attention")
    actual = case.compute_logits(case.tokens(), absorb=True)
    return LogitComparison([(actual, case.expected[0])], "queries projected to the latent space")


def precomputed_cross_attention(case: VerificationCase) -> LogitComparison:
    """Check keys and values of cross-attention that are computed once for all decoding steps."""
    encoder_output = case.encoder_output()
    if encoder_output is None:
        raise CheckSkipped("the model has no cross-attention")
    precomputed = case.network.precompute_cross_attention(encoder_output)
    actual = case.compute_logits(case.tokens(), encoder_output=precomputed)
    return LogitComparison([(actual, case.expected[0])], f"a source of {len(case.sources[0])} tokens")


def compiled(case: VerificationCase) -> LogitComparison:
    """Check the network compiled by torch.compile."""
    if not case.compiles:
        raise CheckSkipped("takes a minute; enable it with --compile")
    network = torch.compile(case.network)
    inputs = [case.tokens()]
    if case.sources:
        inputs.insert(0, torch.tensor([case.sources[0]], device=case.device))
    return LogitComparison([(network(*inputs), case.expected[0])], "with the inductor backend")


def transformers(case: VerificationCase) -> LogitComparison:
    """Check that transformers computes the same logits from the user's own folder.

    A model that was loaded from another format is saved as a Hugging Face folder first.
    """
    if find_spec("transformers") is None:
        raise CheckSkipped("transformers is not installed; pip install transformers")
    if case.dtype == torch.float64:
        raise CheckSkipped("transformers computes norms and positions in float32")
    positions, context = case.config.output_stack.token_embedding.positions, case.config.context
    if isinstance(positions, SinusoidalPositions) and len(case.sequences[0]) > context:
        raise CheckSkipped(f"transformers has only {context} sinusoidal positions; reduce --length")
    own_folder = case.model.folder
    if own_folder is not None and is_packed(case.network):
        raise CheckSkipped("packed weights differ from those of the folder; load the model with full weights")
    with TemporaryDirectory() as folder:
        if own_folder is None:
            try:
                case.model.save(folder, format="huggingface")
            except ClearheadError as reason:
                raise CheckSkipped(str(reason)) from None
        name, logits = _transformers_logits(case, own_folder or Path(folder))
    ours = case.expected[0]
    if case.config.head is None and case.config.classifier is not None:
        ours = case.network(case.tokens())
    if ours.shape == (*logits.shape, 1):  # transformers drops the last axis of ELECTRA's discriminator
        logits = logits[..., None]
    origin = "your folder" if own_folder else "a folder saved by Clearhead"
    return LogitComparison([(ours, logits)], f"{name}, {origin}")


def _transformers_logits(case: VerificationCase, folder: Path) -> tuple[str, Tensor]:
    """Load a folder with transformers; return the name of the class and the logits of the first sequence."""
    module = import_module("transformers")
    names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ["AutoModel"]
    name, network_class = names[0], getattr(module, str(names[0]), None)
    if network_class is None:
        raise CheckSkipped(f"transformers has no class {name}, which config.json names")
    try:
        with _progress_bars_disabled():
            network = network_class.from_pretrained(
                folder, dtype=case.dtype, attn_implementation="eager", use_safetensors=True
            )
    except ImportError as error:  # the package of a quantized format, such as optimum or bitsandbytes
        raise CheckSkipped(f"transformers says: {str(error).splitlines()[0]}") from None
    network = network.to(case.device).eval()
    if case.sources:
        source = torch.tensor([case.sources[0]], device=case.device)
        output = network(input_ids=source, decoder_input_ids=case.tokens())
    else:
        output = network(input_ids=case.tokens())
    return name, output.logits if "logits" in output else output.last_hidden_state


@contextmanager
def _progress_bars_disabled() -> Iterator[None]:
    """Disable the progress bars of transformers inside the block."""
    logging = import_module("transformers.utils.logging")
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
