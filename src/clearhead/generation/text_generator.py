"""TextGenerator: prompts in, generated texts out. Models, chats and traces share it.

    generator = TextGenerator(network, tokenizer, special_ids)
    (generation,) = generator.generate(["Hello"], 1, {"max_new_tokens": 8})

All arguments are checked before the first token is generated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from clearhead.architecture import check_tokens
from clearhead.cache import KeyValueCache
from clearhead.engine import EngineProvider
from clearhead.errors import ClearheadError
from clearhead.generation.beam import Beam, BeamRules, beam_search
from clearhead.generation.cuda_graph import can_decode_in_graph, decode_in_graph
from clearhead.generation.decoding import decode
from clearhead.generation.engine_decoding import can_decode_in_engine, decode_in_engine, require_engine
from clearhead.generation.prompts import (
    Prompt,
    encode_prompt,
    encode_sources,
    explain_out_of_memory,
    require_tokenizer,
)
from clearhead.generation.result import Generation, Stream
from clearhead.generation.sequences import TokenSequence
from clearhead.generation.speculative import Speculation, decode_speculatively
from clearhead.generation.text_output import TextOutput
from clearhead.model import Transformer
from clearhead.options import (
    LARGEST,
    BeamOptions,
    SamplingKeywords,
    SamplingOptions,
    check_names,
    check_positive_integer,
    check_temperature_is_set,
)
from clearhead.tokenization import Tokenizer

OnFinish = Callable[[int, int], None]
_MAX_SEQUENCES = 2**16  # per batch; the decode loop keeps a Python object for each


@dataclass(frozen=True)
class TextGenerator:
    """Generate texts with a network, its tokenizer and its special tokens."""

    network: Transformer
    tokenizer: Tokenizer | None
    special_ids: Mapping[str, Any]
    use_cuda_graph: bool = True  # on an NVIDIA GPU, for models and options that the graph supports
    engine: EngineProvider | None = None  # for several sequences at once; None decodes them in one padded batch

    @property
    def start_id(self) -> int:
        """The first token that the decoder of an encoder-decoder reads."""
        return int(self.special_ids.get("decoder_start_token_id", self.special_ids.get("bos_token_id", 0)))

    @property
    def forced_prefix(self) -> list[int]:
        """The tokens that follow the start token in every text of an encoder-decoder: a language token, or none."""
        forced = self.special_ids.get("forced_bos_token_id")
        return [] if forced is None or not self.network.config.is_encoder_decoder else [int(forced)]

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Tokens that no text contains, except those that end one."""
        found = self.special_ids.get("suppress_tokens", [])
        ids = found if isinstance(found, list) else [found]
        return tuple(token for token in ids if token < self.network.config.vocab_size and token not in self.stop_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The stop tokens of the config and the tokenizer that are in the network's vocabulary."""
        eos = self.special_ids.get("eos_token_id", [])
        ids = frozenset(eos if isinstance(eos, list) else [eos])
        ids |= self.tokenizer.stop_ids if self.tokenizer is not None else frozenset()
        return frozenset(token for token in ids if token < self.network.config.vocab_size)

    # --- complete texts and streams

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        options: Mapping[str, object],
        *,
        beams: int | None = None,
        speculation: Speculation | None = None,
        deterministic: bool | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[Generation]:
        """Return n texts per prompt, in the order of the prompts.

        Without beams these are samples, all in one batch. With beams these are the best texts of a beam search.

        deterministic: True gives each text the same bits alone and among others; see Engine.
        on_finish: is called with the number of texts that are finished and the number of all, when texts finish.
        """
        if deterministic and (beams is not None or speculation is not None):
            raise ClearheadError("deterministic excludes beams and speculate; leave them out")
        if beams is not None:
            if speculation is not None:
                raise ClearheadError("beams and speculate exclude each other; give only one of them")
            return self.search(prompts, n, beams, options)
        sequences = [sequence for prompt in prompts for sequence in self.create_sequences(prompt, n, options)]
        outputs = [TextOutput(self.tokenizer, sequence) for sequence in sequences]
        if speculation is not None and not self.speculates_together(sequences):
            batches = [[output] for output in outputs]
        else:
            batches = [outputs] if outputs else []
        loops = [
            self.start_decoding([output.sequence for output in batch], None, speculation, deterministic)
            for batch in batches
        ]
        with explain_out_of_memory():
            for batch, steps in zip(batches, loops, strict=True):
                active = batch
                for _ in steps:
                    for output in active:
                        output.update()
                    active = [output for output in active if not output.sequence.finished]
                    if on_finish is not None:
                        on_finish(sum(output.sequence.finished for output in outputs), len(outputs))
        return [Generation.from_output(output, self.network.config) for output in outputs]

    def stream(self, prompt: Prompt, options: Mapping[str, object], speculation: Speculation | None = None) -> Stream:
        """Return one sample as a stream of text pieces."""
        output = TextOutput(require_tokenizer(self.tokenizer), *self.create_sequences(prompt, 1, options))
        return Stream(output, self.start_decoding([output.sequence], speculation=speculation), self.network.config)

    def search(
        self, prompts: Sequence[Prompt], n: int, num_beams: int, options: Mapping[str, object]
    ) -> list[Generation]:
        """Return the n best texts per prompt of a beam search."""
        check_names(options, beams=True)
        check_positive_integer("beams", num_beams, at_most=_MAX_SEQUENCES)
        check_positive_integer("n", n)
        if n > num_beams:
            raise ClearheadError(f"n is {n}; it must not exceed the number of beams, {num_beams}")
        beam_options = BeamOptions(num_beams=num_beams, num_best=n, **cast(dict[str, Any], options))
        beam_options = replace(beam_options, stop_ids=(*beam_options.stop_ids, *self.stop_ids))
        limits = SamplingOptions(max_new_tokens=beam_options.max_new_tokens, stop_ids=beam_options.stop_ids)
        sequences = [self.create_sequence(prompt, limits) for prompt in prompts]
        if not sequences:
            return []
        with explain_out_of_memory():
            sources = [sequence.source for sequence in sequences]
            encoder_output = encode_sources(self.network, sources) if sources[0] else None
            prompt_ids = [each.prompt for each in sequences]
            found = beam_search(self.network, prompt_ids, beam_options, encoder_output, self.beam_rules)
        pairs = zip(sequences, found, strict=True)
        return [self._beam_generation(sequence, beam) for sequence, beams in pairs for beam in beams]

    @property
    def beam_rules(self) -> BeamRules:
        """What the beams of every search must and must not contain."""
        end = self.special_ids.get("forced_eos_token_id")
        end = end[0] if isinstance(end, list) else end
        last = end if end is not None and end < self.network.config.vocab_size else None
        return BeamRules(last_token=last, suppressed=self.suppressed_ids, num_forced=len(self.forced_prefix))

    def _beam_generation(self, sequence: TokenSequence, beam: Beam) -> Generation:
        output = TextOutput(self.tokenizer, replace(sequence, tokens=beam.tokens, finished=True))
        output.update()
        return Generation.from_output(output, self.network.config, beam.score)

    # --- shared parts

    def create_sequences(self, prompt: Prompt, n: int, options: Mapping[str, object]) -> list[TokenSequence]:
        """Check the sampling options and return n sequences of one prompt, each with its own seed."""
        check_names(options, beams=False)
        check_positive_integer("n", n, at_most=_MAX_SEQUENCES)
        sampling = SamplingOptions(**cast(SamplingKeywords, options))
        check_temperature_is_set(options, n)
        if sampling.stop:
            require_tokenizer(self.tokenizer)  # stop strings are found in the text
        sampling = replace(sampling, stop_ids=(*sampling.stop_ids, *self.stop_ids))
        if self.suppressed_ids:
            given = dict(cast(Iterable[tuple[int, float]], sampling.logit_bias))
            sampling = replace(sampling, logit_bias=dict.fromkeys(self.suppressed_ids, -LARGEST) | given)
        ids = encode_prompt(prompt, self.tokenizer)
        return [self.create_sequence(ids, each) for each in sampling.for_samples(n)]

    def create_sequence(self, prompt: Prompt, options: SamplingOptions) -> TokenSequence:
        """Return the sequence of a prompt; for an encoder-decoder the prompt is its source."""
        config = self.network.config
        ids = encode_prompt(prompt, self.tokenizer)
        if config.decoder is None:
            raise ClearheadError("this model has only an encoder, so it cannot generate texts; it can embed them")
        if config.head is None:
            raise ClearheadError("this model has no head, so it cannot generate texts; it can embed them")
        if config.encoder is None:
            return TokenSequence(ids, options)
        check_tokens(ids, config.encoder)
        return TokenSequence([self.start_id, *self.forced_prefix], options, source=ids)

    def start_decoding(
        self,
        sequences: list[TokenSequence],
        cache: KeyValueCache | None = None,
        speculation: Speculation | None = None,
        deterministic: bool | None = None,
    ) -> Iterator[None]:
        """Check the sequences and choose the fastest decode loop for them.

        Return its iterator: each iteration adds tokens to the sequences. With speculation it may add several.

        cache: as for `decode`. deterministic: as for `generate`.
        """
        if deterministic:
            engine = self.engine or EngineProvider(self.network)
            require_engine(engine, sequences)
            return decode_in_engine(engine, sequences, deterministic)
        if speculation is not None:
            if self.engine is not None and len(sequences) > 1:
                return decode_in_engine(self.engine, sequences, speculation=speculation)
            (sequence,) = sequences
            return decode_speculatively(self.network, sequence, speculation)
        if cache is None and self.engine is not None and self.suits_engine(self.engine, sequences):
            return decode_in_engine(self.engine, sequences, deterministic)
        if self.use_cuda_graph and can_decode_in_graph(self.network, sequences, cache):
            return decode_in_graph(self.network, sequences, cache)
        return decode(self.network, sequences, cache=cache)

    def speculates_together(self, sequences: list[TokenSequence]) -> bool:
        """Return whether several sequences with drafts can share their steps in the engine."""
        return self.engine is not None and len(sequences) > 1 and can_decode_in_engine(self.engine, sequences)

    def suits_engine(self, engine: EngineProvider, sequences: list[TokenSequence]) -> bool:
        """Return whether the engine is the fastest way: for several texts, and on a GPU with graphs even for one."""
        runs_in_graphs = engine.runs_in_graphs
        if runs_in_graphs and not self.use_cuda_graph:
            return False
        return (runs_in_graphs or len(sequences) > 1) and can_decode_in_engine(engine, sequences)
