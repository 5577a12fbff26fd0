"""The decode loop: read the prompts once, then one token for each row at a time, with a cache (book E2).

    rows = [TokenSequence(prompt_ids, SamplingOptions(max_new_tokens=64))]
    for _ in decode(network, rows): print(rows[0].tokens[-1])

1 the prompts go through the network, left-padded to one length; every layer keeps its keys and values
2 the last logits of each row give its next token
3 that token alone goes through: its key and value join the kept ones, its query looks at all of them
4 rows that are done leave the batch, with what was kept for them
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.architecture import Causal, DynamicScaling, LearnedPositions, Rope, Stack
from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.generation.penalties import TokenCounts
from clearhead.generation.prompts import check_tokens
from clearhead.generation.sampling import TokenLogprobs, check_numbers, choosing_device, next_tokens, token_logprobs
from clearhead.generation.sampling_parameters import SamplingParameters, check_vocabulary
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import SamplingOptions

PIECE = 2048  # tokens; 8,192 through windows of 512 take a sixth of the memory of all at once


@dataclass
class TokenSequence:
    """One sequence of a batch, from prompt to end. Whoever reads it may set `done`, and the loop lets it go."""

    prompt: Sequence[int]
    options: SamplingOptions
    source: Sequence[int] = ()  # what an encoder has read for it
    earlier: Sequence[int] = ()  # the tokens before the prompt, where a given cache holds some
    tokens: list[int] = field(default_factory=list)  # new ones, a stop token included
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each, where the options ask for them
    done: bool = False

    @property
    def finish_reason(self) -> str:
        """What ended it: a `stop` token, `length` (max_new_tokens), `context` (of learned positions); nothing yet."""
        if self.tokens and self.tokens[-1] in self.options.stop_ids:
            return "stop"
        if len(self.tokens) >= self.options.max_new_tokens:
            return "length"
        return "context" if self.done else "nothing"

    def take(self, token: int, limit: int) -> None:
        self.tokens.append(token)
        self.done = token in self.options.stop_ids or len(self.tokens) >= min(self.options.max_new_tokens, limit)


@torch.inference_mode()
def decode(
    network: Transformer,
    rows: Sequence[TokenSequence],
    *,
    encoder_output: EncoderOutput | None = None,
    cache: KeyValueCache | None = None,
) -> Iterator[None]:
    """One token more for every row that is not done, at each turn.

    `memory`: of an encoder, one source for each row. `cache`: of what the rows have `earlier`.
    """
    check(rows, network)
    cache = cache or KeyValueCache(network.config)
    asked = [number for number, row in enumerate(rows) if row.options.max_new_tokens > 0]
    if not asked:
        return
    active, cache, encoder_output = staying(rows, asked, cache, encoder_output)
    state, device = Batch.of(network, active), network.device
    prompts = [list(row.prompt) for row in active]
    if encoder_output is None and cache.length == 0:
        logits, cache = prefill_shared(network, prompts, cache)
    else:
        logits = prefill(network, prompts, cache, encoder_output)
    while True:
        tokens = state.choose(logits)
        for row, token in zip(active, tokens.tolist(), strict=True):
            row.take(token, room(network, len(row.earlier) + len(row.prompt)))
        yield
        kept = [number for number, row in enumerate(active) if not row.done]
        if not kept:
            return
        if len(kept) < len(active):
            active, cache, encoder_output = staying(active, kept, cache, encoder_output)
            tokens, state = tokens[kept], Batch.of(network, active)
        logits = run(network, tokens[:, None].to(device), None, cache, encoder_output)


def staying(
    rows: Sequence[TokenSequence], kept: list[int], cache: KeyValueCache, encoder_output: EncoderOutput | None
) -> tuple[list[TokenSequence], KeyValueCache, EncoderOutput | None]:
    """The rows of these numbers with all that is kept for them; nothing is copied where all stay."""
    if len(kept) < len(rows):
        places = torch.tensor(kept, device=cache.device)
        cache, encoder_output = cache.select(places), None if encoder_output is None else encoder_output.select(places)
    return [rows[number] for number in kept], cache, encoder_output


def run(
    network: Transformer,
    tokens: Tensor,
    mask: Tensor | None,
    cache: KeyValueCache,
    encoder_output: EncoderOutput | None,
) -> Tensor:
    """(B, T) new tokens -> logits after the last (B, V); the cache moves on."""
    absorb = tokens.shape[1] == 1  # one query: cheaper on the latent itself than to unfold the whole past
    hidden = network.hidden_states(tokens, mask, encoder_output=encoder_output, cache=cache, absorb=absorb)
    cache.advance()
    return network.to_logits(hidden[:, -1])


def prefill(
    network: Transformer,
    prompts: Sequence[list[int]],
    cache: KeyValueCache,
    encoder_output: EncoderOutput | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Read all prompts into the cache, `chunk` tokens at once; logits after the last token of each (B, V)."""
    tokens, mask = pad_left(prompts, network.device)
    size = chunk or num_at_once(network.config.output_stack, tokens.shape[1], mask)
    for start in range(0, tokens.shape[1], size):
        piece = None if mask is None else mask[:, start : start + size]
        logits = run(network, tokens[:, start : start + size], piece, cache, encoder_output)
    return logits


def num_at_once(stack: Stack, length: int, padding: Tensor | None) -> int:
    """Causal attention alone takes any length; a mask for windows or padding grows with the square of what is read."""
    is_causal = padding is None and all(isinstance(layer.attention.pattern, Causal) for layer in stack.layers)
    return length if is_causal or turns_by_length(stack) else PIECE


def turns_by_length(stack: Stack) -> bool:
    """Keys that a piece leaves in the cache are turned for its own length, not for that of the whole text."""
    positions = [layer.attention.position for layer in stack.layers]
    return any(isinstance(one, Rope) and isinstance(one.scaling, DynamicScaling) for one in positions)


def prefill_shared(
    network: Transformer, prompts: Sequence[list[int]], cache: KeyValueCache
) -> tuple[Tensor, KeyValueCache]:
    """The same for prompts some of which are equal: each is read once, then its row is copied."""
    different = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    logits = prefill(network, different, cache)
    if len(different) == len(prompts):
        return logits, cache
    places = torch.tensor([different.index(prompt) for prompt in prompts], device=logits.device)
    return logits[places], cache.select(places)


def pad_left(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(B, T) tokens and mask; None where all are of one length."""
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return tokens, None
    gaps = torch.tensor([[longest - len(row)] for row in rows], device=device)
    return tokens, torch.arange(longest, device=device)[None] >= gaps


@dataclass
class Batch:
    """What choosing tokens needs of the rows at hand."""

    rows: Sequence[TokenSequence]
    options: SamplingParameters
    counts: TokenCounts | None
    steps: Tensor  # (B,) tokens made so far

    @staticmethod
    def of(network: Transformer, rows: Sequence[TokenSequence]) -> "Batch":
        device, vocab_size = choosing_device(network.device), network.config.vocab_size
        options = SamplingParameters.of([row.options for row in rows], vocab_size, device)
        counts = None
        if options.needs_counts:
            before = [[*row.earlier, *row.prompt] for row in rows]
            counts = TokenCounts.of(before, [row.tokens for row in rows], vocab_size, device)
        return Batch(rows, options, counts, torch.tensor([len(row.tokens) for row in rows], device=device))

    def choose(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B,)."""
        logits = logits.to(self.steps.device)
        tokens = next_tokens(logits, self.options, self.steps, self.counts)
        check_numbers(logits, tokens)
        self.steps = self.steps + 1
        self.counts = None if self.counts is None else self.counts.add(tokens)
        for number, row in enumerate(self.rows):
            if row.options.logprobs is not None:
                row.logprobs.append(token_logprobs(logits[number], tokens[number], row.options.logprobs))
        return tokens


def check(rows: Sequence[TokenSequence], network: Transformer) -> None:
    if not rows:
        raise ClearheadError("there is no prompt to continue")
    for row in rows:
        check_tokens(row.prompt, network.config.output_stack, len(row.earlier))
        check_vocabulary(row.options, network.config.vocab_size)
        assert row.options.is_greedy or row.options.seed is not None, "seed the options first"


def room(network: Transformer, length: int) -> int:
    """How many tokens a model with learned positions can add to a text of this length; others have no such end."""
    positions = network.config.output_stack.embedding.positions
    if not isinstance(positions, LearnedPositions):
        return 2**62
    return positions.num_positions - length + 1
