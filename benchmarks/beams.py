"""Beam search of a translator: ours, CTranslate2 and transformers in turns; and do we say what transformers says?

    python benchmarks/beams.py                   # Marian's shape at random weights
    python benchmarks/beams.py opus-mt-zh-en     # the real one, after: clearhead get opus-mt-zh-en

Four beams, float32. For the clock no text may end before its 32 tokens, so that all do the same work; for the
comparison texts end where they like. CTranslate2 stops a search by another rule, so its texts are not compared.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path

import ctranslate2
import torch
import transformers

from clearhead.api import Model, load
from clearhead.architecture import ModelConfig
from clearhead.backends import accelerate
from clearhead.benchmark import PAUSE_SECONDS, convert
from clearhead.checkpoint import save_folder
from clearhead.families import preset
from clearhead.generation import BeamOptions, beam_search, encode_sources, pad_right
from clearhead.model import Transformer

NUM_BEAMS, NUM_TOKENS, ROUNDS, BATCHES, NUM_INPUTS = 4, 32, 5, (1, 8), 200
NEVER = -1e4  # as a logit's bias
END = 0  # Marian's token for it; the last of the vocabulary begins an answer, and fills up batches

Translate = Callable[[Sequence[Sequence[int]]], list[list[int]]]


# --- models


@torch.no_grad()
def random_model(config: ModelConfig) -> Model:
    """Weights drawn so large that the likeliest tokens differ by more than rounding; texts end early or not at all."""
    network, generator = Transformer(config).eval(), torch.Generator().manual_seed(0)
    for name, tensor in network.named_parameters():
        if tensor.ndim > 1:
            spread = (3.0 if name.endswith("tokens.weight") else 1.0) * tensor.shape[1] ** -0.5
            tensor.normal_(std=spread, generator=generator)
    assert network.head is not None
    assert network.head.bias is not None
    start = config.vocab_size - 1
    network.decoder.embedding.tokens.weight[start] = 0  # type: ignore[union-attr]
    network.head.bias[start] = NEVER
    network.head.bias[END] = math.log(config.vocab_size) + 3  # half of the texts end early
    return Model(network, special_ids={"decoder_start_token_id": start, "pad_token_id": start, "eos_token_id": END})


@torch.no_grad()
def endless(model: Model) -> Model:
    network = deepcopy(model.network)
    network.head.bias[END] = NEVER  # type: ignore[union-attr,index]
    return Model(network, special_ids=model.special_ids)


def random_sources(config: ModelConfig, count: int, length: int | None = None) -> list[list[int]]:
    """Between 5 and 40 tokens, or of one length, the end included."""
    generator = torch.Generator().manual_seed(1)
    lengths = [length] * count if length else torch.randint(5, 41, (count,), generator=generator).tolist()
    return [[*torch.randint(1, config.vocab_size - 1, (n - 1,), generator=generator).tolist(), END] for n in lengths]


# --- engines


def ours(model: Model) -> Translate:
    network = deepcopy(model.network)
    accelerate(network)
    start = model.special_ids["decoder_start_token_id"]
    options = BeamOptions(num_beams=NUM_BEAMS, max_new_tokens=NUM_TOKENS, stop_ids=[END])

    def translate(sources: Sequence[Sequence[int]]) -> list[list[int]]:
        found = beam_search(network, [[start]] * len(sources), options, encode_sources(network, sources))
        return [beams[0].tokens for beams in found]

    return translate


def by_transformers(model: Model, folder: Path) -> Translate:
    theirs = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    pad = model.special_ids["pad_token_id"]
    options = {"num_beams": NUM_BEAMS, "max_new_tokens": NUM_TOKENS, "do_sample": False, "early_stopping": False}
    theirs.generation_config.forced_eos_token_id = None
    theirs.generation_config.bad_words_ids = None

    def translate(sources: Sequence[Sequence[int]]) -> list[list[int]]:
        tokens, mask = pad_right(sources, torch.device("cpu"))
        found = theirs.generate(input_ids=tokens, attention_mask=mask.long(), **options)[:, 1:]
        return [[token for token in row if token != pad] for row in found.tolist()]

    return translate


def by_ctranslate2(folder: Path, target: Path) -> Translate:
    convert(folder, target, "float32")
    theirs = ctranslate2.Translator(
        str(target), compute_type="float32", inter_threads=1, intra_threads=torch.get_num_threads()
    )

    def translate(sources: Sequence[Sequence[int]]) -> list[list[int]]:
        words = [[str(token) for token in source] for source in sources]
        found = theirs.translate_batch(words, beam_size=NUM_BEAMS, max_decoding_length=NUM_TOKENS)
        return [[int(word) for word in one.hypotheses[0]] for one in found]

    return translate


# --- what is measured


def num_agreeing(model: Model, count: int, folder: Path) -> int:
    """Of so many random inputs, in batches of 8: those of which we and transformers make the same tokens."""
    save_folder(model.network, folder, model.family, model.special_ids)
    one, other = ours(model), by_transformers(model, folder)
    sources = random_sources(model.config, count)
    batches = [sources[start : start + 8] for start in range(0, count, 8)]
    return sum(a == b for batch in batches for a, b in zip(one(batch), other(batch), strict=True))


def speeds(model: Model, folder: Path, rounds: int = ROUNDS) -> list[dict[str, object]]:
    """Tokens of finished texts per second, by engine and batch."""
    model = endless(model)
    save_folder(model.network, folder, model.family, model.special_ids)
    engines = {
        "clearhead": ours(model),
        "ctranslate2": by_ctranslate2(folder, folder.with_name("ctranslate2")),
        "huggingface": by_transformers(model, folder),
    }
    rows: list[dict[str, object]] = []
    for batch in BATCHES:
        sources = random_sources(model.config, batch, length=24)
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):  # the first warms up
            for name, translate in engines.items():
                time.sleep(PAUSE_SECONDS)
                start = time.perf_counter()
                found = translate(sources)
                seconds = time.perf_counter() - start
                assert [len(one) for one in found] == [NUM_TOKENS] * batch, name
                if number:
                    taken[name].append(seconds)
        for name, times in taken.items():
            middle = statistics.median(times)
            spread = (max(times) - min(times)) / middle
            rows.append(
                {"engine": name, "batch": batch, "tokens_per_second": batch * NUM_TOKENS / middle, "spread": spread}
            )
    return rows


def main(arguments: Sequence[str]) -> None:
    model = load(arguments[0], dtype="float32") if arguments else random_model(preset("marian"))
    with tempfile.TemporaryDirectory() as folder:
        for row in speeds(model, Path(folder) / "endless"):
            print(json.dumps(row), flush=True)
        same = num_agreeing(model, NUM_INPUTS, Path(folder) / "marian")
    print(json.dumps({"same_tokens_as_transformers": same, "inputs": NUM_INPUTS}))
    print(json.dumps({name: version(name) for name in ("torch", "transformers", "ctranslate2")}))


if __name__ == "__main__":
    main(sys.argv[1:])
