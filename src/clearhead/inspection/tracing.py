"""Ways to a trace: of a text, of what a model generates, of a row in training. All run the fast path.

traced = trace_text(generator, "The cat sat on the mat"); traced.attention(layer=3, head=2)   # (T, T), rows sum to 1
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.architecture import Stack
from clearhead.errors import ClearheadError
from clearhead.generation import Prompt, TextGenerator, check_tokens, token_ids
from clearhead.inspection.heads import index
from clearhead.inspection.record import Inputs, Listening, resting, run
from clearhead.inspection.trace import Trace
from clearhead.model import Transformer
from clearhead.tokenization import Tokenizer

MAX_TOKENS = 32_768  # the weights of one head would be 4 GiB in float32


def trace_text(
    generator: TextGenerator, text: Prompt, source: Prompt | None = None, *, keep_heads: bool = False
) -> Trace:
    """Run one forward pass over a text or token ids and return its trace.

    An encoder-decoder reads `source`; `text` is then the answer that its decoder reads. keep_heads: compute the
    queries, keys and values of all layers now and keep them.
    """
    network, config, tokenizer = generator.network, generator.network.config, generator.tokenizer
    if config.is_encoder_decoder != (source is not None):
        if source is None:
            raise ClearheadError("an encoder-decoder needs a source, what it answers; the text is its answer")
        raise ClearheadError("only an encoder-decoder takes a source; leave it out, this model reads the text alone")
    tokens = token_ids(text, tokenizer)
    if source is not None and isinstance(text, str):
        tokens = decoder_input(generator, tokens)
    inputs = inputs_of(tokens, network, config.output_stack)
    encoder_inputs = None
    if source is not None:
        assert config.encoder is not None
        encoder_inputs = inputs_of(token_ids(source, tokenizer), network, config.encoder)
    return record(network, inputs, encoder_inputs, tokenizer=tokenizer, keep_heads=keep_heads)


def decoder_input(generator: TextGenerator, answer: list[int]) -> list[int]:
    """Return what the decoder reads to produce `answer`: the start token, then the answer without its end token."""
    ends = generator.tokenizer is not None and answer[-1:] == [generator.tokenizer.eos_id]
    return [generator.start_id, *(answer[:-1] if ends else answer)]


def inputs_of(tokens: list[int], network: Transformer, stack: Stack) -> Inputs:
    check_length(len(tokens))
    check_tokens(tokens, stack)
    return Inputs(torch.tensor([tokens], device=network.device))


def trace_generation(generator: TextGenerator, prompt: Prompt, **options: Any) -> Trace:
    """Generate with a cache and trace every token the network read: all but the last generated one.

    Rotations whose frequencies depend on the length (dynamic scaling) are shown for the final length.
    """
    for name in ("n", "beams", "speculate"):
        if name in options:
            raise ClearheadError(f"a trace follows one text, token by token; leave out {name}")
    network = generator.network
    listening = Listening(network)
    (generation,) = replace(generator, network=listening, in_graph=False).sample([prompt], 1, options)
    states = {
        name: {depth: torch.cat(pieces, dim=1)[0] for depth, pieces in depths.items() if pieces}
        for name, depths in listening.residuals.items()
    }
    if not states["decoder"]:
        raise ClearheadError("nothing was generated; max_new_tokens must be at least 1")
    is_encoder_decoder = network.config.is_encoder_decoder
    tokens = [*([generator.start_id] if is_encoder_decoder else generation.prompt_tokens), *generation.tokens]
    inputs = {"decoder": Inputs(torch.tensor([tokens[: len(states["decoder"][0])]], device=network.device))}
    if is_encoder_decoder:
        inputs["encoder"] = Inputs(torch.tensor([generation.prompt_tokens], device=network.device))
    return assemble(network, inputs, states, generator.tokenizer)


class Rows(Protocol):
    """A batch of training, as data/batch.py has it."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor | None: ...
    @property
    def documents(self) -> Tensor | None: ...
    @property
    def positions(self) -> Tensor | None: ...
    @property
    def source(self) -> Tensor | None: ...
    @property
    def source_mask(self) -> Tensor | None: ...


def trace_row(network: Transformer, batch: Rows, row: int = 0, tokenizer: Tokenizer | None = None) -> Trace:
    """One row of a batch, in the middle of a training run: without dropout, and without a gradient.

    Its streams and heads are of this step. What branches add and the logits are computed when they are asked for, with
    the weights of then: ask before the next step.
    """
    row = index("row", row, len(batch.tokens))

    def of(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[row : row + 1]

    inputs = Inputs(batch.tokens[row : row + 1], of(batch.mask), of(batch.positions), of(batch.documents))
    source = None if batch.source is None else Inputs(batch.source[row : row + 1], of(batch.source_mask))
    return record(network, inputs, source, tokenizer=tokenizer, keep_heads=True)


@torch.no_grad()
def record(
    network: Transformer,
    inputs: Inputs,
    source: Inputs | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    keep_heads: bool = False,
) -> Trace:
    """One forward on the fast path. Where heads are kept, so are all streams: nothing then depends on later weights."""
    check_length(max(part.tokens.shape[1] for part in (inputs, source) if part is not None))
    listening = Listening(network, sparsely=not keep_heads)
    with resting(network):
        run(listening, inputs, source)
    residuals = listening.residuals.items()
    states = {name: {depth: pieces[0][0] for depth, pieces in depths.items()} for name, depths in residuals}
    name = "encoder" if network.decoder is None else "decoder"
    both = {name: inputs} if source is None else {"decoder": inputs, "encoder": source}
    made = assemble(network, both, states, tokenizer)
    return made.with_heads() if keep_heads else made


def check_length(num_tokens: int) -> None:
    if num_tokens > MAX_TOKENS:
        raise ClearheadError(
            f"a trace of {num_tokens:,} tokens is too long; give at most {MAX_TOKENS:,}, such as tokens[-{MAX_TOKENS}:]"
        )


def assemble(
    network: Transformer,
    inputs: dict[str, Inputs],
    states: dict[str, dict[int, Tensor]],
    tokenizer: Tokenizer | None,
) -> Trace:
    tokens = {name: read.tokens[0].tolist() for name, read in inputs.items()}
    texts = {name: [text_of(token, tokenizer) for token in tokens[name]] for name in tokens}
    name = "encoder" if network.decoder is None else "decoder"
    source = "encoder" if network.config.is_encoder_decoder else ""
    return Trace(
        config=network.config,
        tokens=tokens[name],
        token_texts=texts[name],
        states=states,
        source_tokens=tokens.get(source),
        source_texts=texts.get(source),
        network=network,
        inputs=inputs,
    )


def text_of(token: int, tokenizer: Tokenizer | None) -> str:
    """Networks often have more ids than their tokenizer has tokens."""
    return str(token) if tokenizer is None or token >= tokenizer.vocab_size else tokenizer.token_text(token)
