"""Record traces: of a text, of a generation, or of one sequence of a training batch. All run the fast path.

traced = trace_text(generator, "The cat sat on the mat"); traced.attention(layer=3, head=2)   # (T, T), rows sum to 1
"""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from clearhead.architecture import Stack, check_tokens
from clearhead.data import Batch
from clearhead.errors import ClearheadError
from clearhead.generation import Prompt, TextGenerator, encode_prompt
from clearhead.inspection.attention_heads import check_index
from clearhead.inspection.recording import RecordingTransformer, StackInputs, evaluation_mode, run_network
from clearhead.inspection.token_labels import token_text
from clearhead.inspection.trace import Trace
from clearhead.model import Transformer
from clearhead.options import SamplingKeywords
from clearhead.tokenization import Tokenizer, encode_target

MAX_TOKENS = 32_768  # the weights of one head would be 4 GiB in float32


def trace_text(
    generator: TextGenerator,
    text: Prompt,
    source: Prompt | None = None,
    *,
    keep_heads: bool = False,
    keep_residuals: bool = False,
) -> Trace:
    """Run one forward pass over a text or token ids and return its trace.

    An encoder-decoder reads `source`; `text` is then the answer that its decoder reads. keep_heads: compute the
    queries, keys and values of all layers now and keep them. keep_residuals: keep the residual stream at every depth.
    """
    network, config, tokenizer = generator.network, generator.network.config, generator.tokenizer
    if config.is_encoder_decoder != (source is not None):
        if source is None:
            raise ClearheadError("an encoder-decoder needs a source; the text is only the input of its decoder")
        raise ClearheadError("this model has no encoder and reads the text only; leave out the source")
    if source is not None and isinstance(text, str) and tokenizer is not None:
        tokens = _decoder_input(generator, encode_target(text, tokenizer))
    else:
        tokens = encode_prompt(text, tokenizer)
    inputs = _checked_inputs(tokens, network, config.output_stack)
    source_inputs = None
    if source is not None:
        assert config.encoder is not None
        source_inputs = _checked_inputs(encode_prompt(source, tokenizer), network, config.encoder)
    kept = {"keep_heads": keep_heads, "keep_residuals": keep_residuals}
    return record(network, inputs, source_inputs, tokenizer=tokenizer, **kept)


def _decoder_input(generator: TextGenerator, answer: list[int]) -> list[int]:
    """Return what the decoder reads to produce `answer`: the start token, then the answer without its end token."""
    ends = generator.tokenizer is not None and answer[-1:] == [generator.tokenizer.eos_id]
    return [generator.start_id, *(answer[:-1] if ends else answer)]


def _checked_inputs(tokens: list[int], network: Transformer, stack: Stack) -> StackInputs:
    """Return token ids as inputs of a stack, after checking their number and range."""
    _check_length(len(tokens))
    check_tokens(tokens, stack)
    return StackInputs(torch.tensor([tokens], device=network.device))


def trace_generation(generator: TextGenerator, prompt: Prompt, **options: Unpack[SamplingKeywords]) -> Trace:
    """Generate with a cache and trace every token the network read: all but the last generated one.

    options: those of sampling, such as max_new_tokens. Rotations whose frequencies depend on the length (dynamic
    scaling) are shown for the final length.
    """
    for name in ("n", "beams", "speculate"):
        if name in options:
            raise ClearheadError(f"a trace follows one sequence token by token; leave out {name}")
    network = generator.network
    recorder = RecordingTransformer(network)
    (generation,) = replace(generator, network=recorder, use_cuda_graph=False).generate([prompt], 1, options)
    residuals = {
        name: {depth: torch.cat(pieces, dim=1)[0] for depth, pieces in depths.items() if pieces}
        for name, depths in recorder.residuals.items()
    }
    if not residuals["decoder"]:
        raise ClearheadError("nothing was generated; max_new_tokens must be at least 1")
    is_encoder_decoder = network.config.is_encoder_decoder
    tokens = [*([generator.start_id] if is_encoder_decoder else generation.prompt_tokens), *generation.tokens]
    tokens = tokens[: len(residuals["decoder"][0])]
    inputs = {"decoder": StackInputs(torch.tensor([tokens], device=network.device))}
    if is_encoder_decoder:
        inputs["encoder"] = StackInputs(torch.tensor([generation.prompt_tokens], device=network.device))
    return _build_trace(network, inputs, residuals, generator.tokenizer)


def trace_batch(network: Transformer, batch: Batch, row: int = 0, tokenizer: Tokenizer | None = None) -> Trace:
    """Trace one sequence of a batch during training, without dropout and without gradients.

    The residual streams and heads belong to the current step. Branch outputs and logits are computed on request with
    the weights at that time: read them before the next optimizer step.
    """
    row = check_index("row", row, len(batch.tokens))

    def select_row(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[row : row + 1]

    inputs = StackInputs(
        batch.tokens[row : row + 1], select_row(batch.mask), select_row(batch.positions), select_row(batch.documents)
    )
    source = None if batch.source is None else StackInputs(batch.source[row : row + 1], select_row(batch.source_mask))
    return record(network, inputs, source, tokenizer=tokenizer, keep_heads=True)


@torch.no_grad()
def record(
    network: Transformer,
    inputs: StackInputs,
    source: StackInputs | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    keep_heads: bool = False,
    keep_residuals: bool = False,
) -> Trace:
    """Run one forward pass on the fast path and return its trace.

    keep_heads also keeps the residual stream at every depth, so that attention no longer depends on the weights.
    """
    _check_length(max(part.tokens.shape[1] for part in (inputs, source) if part is not None))
    recorder = RecordingTransformer(network, sparse=not (keep_heads or keep_residuals))
    with evaluation_mode(network):
        run_network(recorder, inputs, source)
    residuals = {
        name: {depth: pieces[0][0] for depth, pieces in depths.items()} for name, depths in recorder.residuals.items()
    }
    name = "encoder" if network.decoder is None else "decoder"
    stack_inputs = {name: inputs} if source is None else {"decoder": inputs, "encoder": source}
    trace = _build_trace(network, stack_inputs, residuals, tokenizer)
    return trace.with_heads() if keep_heads else trace


def _check_length(num_tokens: int) -> None:
    """Raise ClearheadError if a sequence is too long to trace."""
    if num_tokens > MAX_TOKENS:
        raise ClearheadError(
            f"{num_tokens:,} tokens are too many for a trace; "
            f"give at most {MAX_TOKENS:,}, for example tokens[-{MAX_TOKENS}:]"
        )


def _build_trace(
    network: Transformer,
    inputs: dict[str, StackInputs],
    residuals: dict[str, dict[int, Tensor]],
    tokenizer: Tokenizer | None,
) -> Trace:
    """Return the trace of recorded residual streams, with the text of every token."""
    tokens = {name: stack_inputs.tokens[0].tolist() for name, stack_inputs in inputs.items()}
    texts = {name: [token_text(token, tokenizer) for token in tokens[name]] for name in tokens}
    name = "encoder" if network.decoder is None else "decoder"
    source = "encoder" if network.config.is_encoder_decoder else ""
    return Trace(
        config=network.config,
        tokens=tokens[name],
        token_texts=texts[name],
        residuals=residuals,
        source_tokens=tokens.get(source),
        source_texts=texts.get(source),
        network=network,
        inputs=inputs,
    )
