"""Measure beam search of a translation model in Clearhead, CTranslate2 and transformers, and compare the texts.

    python benchmarks/beams.py                   # the architecture of Marian with random weights
    python benchmarks/beams.py opus-mt-zh-en     # a real model, after: clearhead get opus-mt-zh-en

Four beams in float32. In the timing no text ends before its 32 tokens, so that all engines do the same work. In the
comparison with transformers texts end normally. CTranslate2 stops a search by another rule, so its texts are not
compared.
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
from clearhead.benchmark import PAUSE_SECONDS, convert_to_ctranslate2
from clearhead.checkpoint import save_folder
from clearhead.families import preset
from clearhead.generation import beam_search, encode_sources, pad_right
from clearhead.model import Transformer
from clearhead.options import BeamOptions

NUM_BEAMS, NUM_TOKENS, ROUNDS, BATCHES, NUM_INPUTS = 4, 32, 5, (1, 8), 200
EXCLUDED = -1e4  # logit bias that excludes a token
END_ID = 0  # of Marian; its last token is both the start token and the padding

Translate = Callable[[Sequence[Sequence[int]]], list[list[int]]]


# --- models


@torch.no_grad()
def random_model(config: ModelConfig) -> Model:
    """Return a model whose random weights are so large that the best tokens differ by more than rounding."""
    network, generator = Transformer(config).eval(), torch.Generator().manual_seed(0)
    for name, tensor in network.named_parameters():
        if tensor.ndim > 1:
            std = (3.0 if name.endswith("tokens.weight") else 1.0) * tensor.shape[1] ** -0.5
            tensor.normal_(std=std, generator=generator)
    assert network.head is not None
    assert network.head.bias is not None
    start = config.vocab_size - 1
    network.decoder.embedding.tokens.weight[start] = 0  # type: ignore[union-attr]
    network.head.bias[start] = EXCLUDED
    network.head.bias[END_ID] = math.log(config.vocab_size) + 3  # half of the texts end early
    return Model(network, special_ids={"decoder_start_token_id": start, "pad_token_id": start, "eos_token_id": END_ID})


@torch.no_grad()
def without_end(model: Model) -> Model:
    """Return a copy of a model that never generates the end token."""
    network = deepcopy(model.network)
    network.head.bias[END_ID] = EXCLUDED  # type: ignore[union-attr,index]
    return Model(network, special_ids=model.special_ids)


def random_sources(config: ModelConfig, count: int, length: int | None = None) -> list[list[int]]:
    """Return random sources of 5 to 40 tokens, or of one length, including the end token."""
    generator = torch.Generator().manual_seed(1)
    lengths = [length] * count if length else torch.randint(5, 41, (count,), generator=generator).tolist()
    return [[*torch.randint(1, config.vocab_size - 1, (n - 1,), generator=generator).tolist(), END_ID] for n in lengths]


# --- engines


def clearhead_translator(model: Model) -> Translate:
    """Return a translation function that runs Clearhead's beam search in the C++ kernels."""
    network = deepcopy(model.network)
    accelerate(network)
    start = model.special_ids["decoder_start_token_id"]
    options = BeamOptions(num_beams=NUM_BEAMS, max_new_tokens=NUM_TOKENS, stop_ids=[END_ID])

    def translate(sources: Sequence[Sequence[int]]) -> list[list[int]]:
        results = beam_search(network, [[start]] * len(sources), options, encode_sources(network, sources))
        return [beams[0].tokens for beams in results]

    return translate


def transformers_translator(model: Model, folder: Path) -> Translate:
    """Return a translation function that runs the beam search of transformers on a saved model."""
    network = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    pad = model.special_ids["pad_token_id"]
    options = {"num_beams": NUM_BEAMS, "max_new_tokens": NUM_TOKENS, "do_sample": False, "early_stopping": False}
    network.generation_config.forced_eos_token_id = None
    network.generation_config.bad_words_ids = None

    def translate(sources: Sequence[Sequence[int]]) -> list[list[int]]:
        tokens, mask = pad_right(sources, torch.device("cpu"))
        outputs = network.generate(input_ids=tokens, attention_mask=mask.long(), **options)[:, 1:]
        return [[token for token in output if token != pad] for output in outputs.tolist()]

    return translate


def ctranslate2_translator(folder: Path, output: Path) -> Translate:
    """Return a translation function that converts a saved model and runs the beam search of CTranslate2."""
    convert_to_ctranslate2(folder, output, "float32")
    translator = ctranslate2.Translator(
        str(output), compute_type="float32", inter_threads=1, intra_threads=torch.get_num_threads()
    )

    def translate(sources: Sequence[Sequence[int]]) -> list[list[int]]:
        words = [[str(token) for token in source] for source in sources]
        results = translator.translate_batch(words, beam_size=NUM_BEAMS, max_decoding_length=NUM_TOKENS)
        return [[int(word) for word in result.hypotheses[0]] for result in results]

    return translate


# --- measurements


def count_equal_texts(model: Model, count: int, folder: Path) -> int:
    """Return for how many of `count` random inputs, in batches of 8, we generate the tokens of transformers."""
    save_folder(model.network, folder, model.family, model.special_ids)
    clearhead, reference = clearhead_translator(model), transformers_translator(model, folder)
    sources = random_sources(model.config, count)
    batches = [sources[start : start + 8] for start in range(0, count, 8)]
    return sum(a == b for batch in batches for a, b in zip(clearhead(batch), reference(batch), strict=True))


def measure_speeds(model: Model, folder: Path, rounds: int = ROUNDS) -> list[dict[str, object]]:
    """Return the tokens of finished texts per second, by engine and batch size."""
    model = without_end(model)
    save_folder(model.network, folder, model.family, model.special_ids)
    engines = {
        "clearhead": clearhead_translator(model),
        "ctranslate2": ctranslate2_translator(folder, folder.with_name("ctranslate2")),
        "huggingface": transformers_translator(model, folder),
    }
    results: list[dict[str, object]] = []
    for batch in BATCHES:
        sources = random_sources(model.config, batch, length=24)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):  # the first round is a warm-up
            for name, translate in engines.items():
                time.sleep(PAUSE_SECONDS)
                start = time.perf_counter()
                texts = translate(sources)
                elapsed = time.perf_counter() - start
                assert [len(text) for text in texts] == [NUM_TOKENS] * batch, name
                if number:
                    seconds[name].append(elapsed)
        for name, times in seconds.items():
            median = statistics.median(times)
            spread = (max(times) - min(times)) / median
            results.append(
                {"engine": name, "batch": batch, "tokens_per_second": batch * NUM_TOKENS / median, "spread": spread}
            )
    return results


def main(arguments: Sequence[str]) -> None:
    model = load(arguments[0], dtype="float32") if arguments else random_model(preset("marian"))
    with tempfile.TemporaryDirectory() as folder:
        for result in measure_speeds(model, Path(folder) / "without_end"):
            print(json.dumps(result), flush=True)
        num_equal = count_equal_texts(model, NUM_INPUTS, Path(folder) / "marian")
    print(json.dumps({"same_tokens_as_transformers": num_equal, "inputs": NUM_INPUTS}))
    print(json.dumps({name: version(name) for name in ("torch", "transformers", "ctranslate2")}))


if __name__ == "__main__":
    main(sys.argv[1:])
