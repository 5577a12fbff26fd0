"""A network with all it takes to speak: prompts in as text or ids, what it says out. Models and chats share it.

    speaker = TextGenerator(network, tokenizer, special_ids); speaker.sample(["Hello"], n=1, options={"max_new_tokens": 8})

Everything a caller can get wrong is found before the first token is made.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError, unknown_name
from clearhead.generation.beam import Beam, BeamOptions, beam_search
from clearhead.generation.cuda_graph import decode_in_graph, fits
from clearhead.generation.decode import TokenSequence, check, decode
from clearhead.generation.prompts import (
    Prompt,
    check_tokens,
    encode_sources,
    explain_out_of_memory,
    require_tokenizer,
    token_ids,
)
from clearhead.generation.randomness import signed
from clearhead.generation.result import Generation, Stream
from clearhead.generation.speculative import Speculation, check_speculation, decode_speculatively, drafter_for
from clearhead.generation.transcript import Transcript
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import SamplingOptions, check_count, check_effect
from clearhead.tokenization import Tokenizer

SAMPLING = frozenset(field.name for field in fields(SamplingOptions))
BEAMS = frozenset(field.name for field in fields(BeamOptions)) - {"num_beams", "num_best"}
OTHERS = ("n", "beams", "speculate")  # arguments of their own


@dataclass(frozen=True)
class TextGenerator:
    network: Transformer
    tokenizer: Tokenizer | None
    special_ids: Mapping[str, Any]
    in_graph: bool = True  # the steps on an NVIDIA GPU, where graph.py knows how

    @property
    def start_id(self) -> int:
        """What an encoder-decoder's answer begins with."""
        return int(self.special_ids.get("decoder_start_token_id", self.special_ids.get("bos_token_id", 0)))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Of the config and of the tokenizer, as far as the network can say them."""
        ends = self.special_ids.get("eos_token_id", [])
        known = frozenset(ends if isinstance(ends, list) else [ends])
        known |= self.tokenizer.stop_ids if self.tokenizer is not None else frozenset()
        return frozenset(token for token in known if token < self.network.config.vocab_size)

    # --- three ways to make texts

    def sample(
        self, prompts: Sequence[Prompt], n: int, options: Mapping[str, Any], speculation: Speculation | None = None
    ) -> list[Generation]:
        """n samples of each prompt, all in one batch; one after the other where tokens are guessed ahead."""
        rows = [row for prompt in prompts for row in self.rows(prompt, n, options)]
        transcripts = [Transcript(self.tokenizer, row) for row in rows]
        batches = [[row] for row in rows] if speculation is not None else [rows] if rows else []
        for turns in [self.turns(batch, speculation=speculation) for batch in batches]:
            for _ in turns:
                for transcript in transcripts:
                    transcript.read()
        return [Generation.of(transcript, self.network.config) for transcript in transcripts]

    def stream(self, prompt: Prompt, options: Mapping[str, Any], speculation: Speculation | None = None) -> Stream:
        transcript = Transcript(require_tokenizer(self.tokenizer), *self.rows(prompt, 1, options))
        return Stream(transcript, self.turns([transcript.row], speculation=speculation), self.network.config)

    def search(self, prompts: Sequence[Prompt], n: int, num_beams: int, options: Mapping[str, Any]) -> list[Generation]:
        """The n best texts of each prompt that `num_beams` beams find."""
        check_names(options, BEAMS, SAMPLING, "with beams")
        check_count("beams", num_beams)
        check_count("n", n)
        if n > num_beams:
            raise ClearheadError(f"n is {n}; it must not exceed the number of beams, {num_beams}")
        asked = BeamOptions(num_beams=num_beams, num_best=n, **options)
        asked = replace(asked, stop_ids=(*asked.stop_ids, *self.stop_ids))
        ending = SamplingOptions(max_new_tokens=asked.max_new_tokens, stop_ids=asked.stop_ids)
        rows = [self.row(prompt, ending) for prompt in prompts]
        if not rows:
            return []
        with explain_out_of_memory():
            found = beam_search(self.network, [row.prompt for row in rows], asked, self.encoder_output_of(rows))
        return [self.told(row, beam) for row, beams in zip(rows, found, strict=True) for beam in beams]

    def told(self, row: TokenSequence, beam: Beam) -> Generation:
        transcript = Transcript(self.tokenizer, replace(row, tokens=beam.tokens, done=True))
        transcript.read()
        return Generation.of(transcript, self.network.config, beam.score)

    # --- what they share

    def rows(self, prompt: Prompt, n: int, options: Mapping[str, Any]) -> list[TokenSequence]:
        """n rows of one prompt, each with a seed of its own."""
        check_names(options, SAMPLING, BEAMS, "without beams")
        check_count("n", n)
        asked = SamplingOptions(**options).seeded()
        check_effect(options, n)
        if asked.stop:
            require_tokenizer(self.tokenizer)  # a stop string is found in the text
        asked = replace(asked, stop_ids=(*asked.stop_ids, *self.stop_ids))
        ids = token_ids(prompt, self.tokenizer)
        seeds = [signed(((asked.seed or 0) + number) % 2**64) for number in range(n)]
        return [self.row(ids, replace(asked, seed=seed)) for seed in seeds]

    def row(self, prompt: Prompt, options: SamplingOptions) -> TokenSequence:
        config, ids = self.network.config, token_ids(prompt, self.tokenizer)
        if config.decoder is None:
            raise ClearheadError("this model is an encoder alone: it embeds texts, and does not generate any")
        if config.head is None:
            raise ClearheadError("this model has no head: it embeds texts, and does not generate any")
        if config.encoder is None:
            return TokenSequence(ids, options)
        check_tokens(ids, config.encoder)
        return TokenSequence([self.start_id], options, source=ids)

    def turns(
        self, rows: list[TokenSequence], cache: KeyValueCache | None = None, speculation: Speculation | None = None
    ) -> Iterator[None]:
        """One token more for every row at each; `cache` as for `decode`, one row alone where tokens are guessed."""
        check(rows, self.network)
        if speculation is not None:
            check_speculation(self.network, speculation)
        return self.run(rows, cache, speculation)

    def run(
        self, rows: list[TokenSequence], cache: KeyValueCache | None, speculation: Speculation | None
    ) -> Iterator[None]:
        with explain_out_of_memory():
            encoder_output = self.encoder_output_of(rows)
            if speculation is None and self.in_graph and fits(self.network, rows, cache):
                yield from decode_in_graph(self.network, rows, cache)
            elif speculation is None:
                yield from decode(self.network, rows, encoder_output=encoder_output, cache=cache)
            else:
                (row,) = rows
                yield from decode_speculatively(
                    self.network, row, drafter_for(speculation, row), encoder_output=encoder_output
                )

    def encoder_output_of(self, rows: Sequence[TokenSequence]) -> EncoderOutput | None:
        return encode_sources(self.network, [row.source for row in rows]) if rows[0].source else None


def check_names(options: Mapping[str, Any], known: Iterable[str], elsewhere: Iterable[str], here: str) -> None:
    for name in options:
        if name not in known and name in elsewhere:
            raise ClearheadError(f"{name} has no effect {here}; leave it out")
        if name not in known:
            raise unknown_name("option of generate:", name, {*known, *OTHERS})
