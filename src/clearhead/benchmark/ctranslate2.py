"""CTranslate2 as a peer: converted by its own converter from a folder that we wrote.

    engine = CTranslate2(subject, "int8")

It speaks in strings, so each token is called by its number, and no tokenizer is needed.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clearhead.benchmark.engine import Engine, Hear
from clearhead.benchmark.subject import Subject, import_peer, transformers_package
from clearhead.benchmark.traffic import weights_held, weights_read
from clearhead.errors import ClearheadError


class CTranslate2(Engine):
    name = "ctranslate2"
    cache_element_bytes = 4  # it computes in float32 on a processor, whatever the weights

    def __init__(self, subject: Subject, weights: str):
        package = import_peer("ctranslate2", "ctranslate2")
        transformers_package()  # its converter reads by it
        self.weights, self.last_id = weights, subject.model.config.vocab_size - 1
        folder = convert(subject.huggingface_folder(), subject.folder / f"ctranslate2-{weights}", weights)
        self.generator = package.Generator(
            str(folder),
            device=subject.device.type,
            compute_type=weights,
            inter_threads=1,
            intra_threads=subject.num_threads,
        )
        read_share = weights_read(subject.network) / weights_held(subject.network)
        self.weight_bytes = int((folder / "model.bin").stat().st_size * read_share)

    def speak(self, prompt: Sequence[int], num_tokens: int, hear: Hear) -> None:
        def step(result: Any) -> bool:
            hear(result.token_id)
            return False

        self.generator.generate_batch(
            [[str(token) for token in prompt]],
            include_prompt_in_result=False,
            min_length=num_tokens,
            max_length=num_tokens,
            end_token=[self.last_id],  # one must be ruled out as the end; the last of a vocabulary hardly ever comes
            callback=step,
        )


def convert(source: Path, target: Path, weights: str) -> Path:
    """`source`: a folder of transformers."""
    converters = import_peer("ctranslate2.converters", "ctranslate2")
    converter = type("Converter", (converters.TransformersConverter,), {"load_tokenizer": numbers_as_words})
    try:
        converter(str(source)).convert(str(target), quantization=weights)
    except (ValueError, NotImplementedError, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0].split(" (")[0]
        raise ClearheadError(f"its converter does not know this model: {reason}") from None
    return target


def numbers_as_words(converter: Any, tokenizer_class: type, folder: str, **options: Any) -> Any:
    """What its converter asks of a tokenizer."""
    config = transformers_package().AutoConfig.from_pretrained(folder)
    words = [str(number) for number in range(config.vocab_size)]
    if config.is_encoder_decoder:
        words[-1] = "<pad>"  # Marian's last: the converter takes it and its weights out
    ends = config.eos_token_id or 0
    end = words[ends[0] if isinstance(ends, list) else ends]
    return SimpleNamespace(
        get_vocab=lambda: {word: number for number, word in enumerate(words)},
        convert_ids_to_tokens=lambda number: words[number],
        bos_token=words[config.bos_token_id or 0],
        eos_token=end,
        unk_token=words[0],
    )
