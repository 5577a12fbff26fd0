"""CTranslate2 as an engine, converted by its own converter from a folder that Clearhead wrote.

    engine = CTranslate2Engine(target, "int8")

CTranslate2 takes tokens as strings, so each token is named by its id, and no tokenizer is needed.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clearhead.benchmark.inference_engine import InferenceEngine, OnToken
from clearhead.benchmark.memory_traffic import total_weight_bytes, weight_bytes_read
from clearhead.benchmark.target import BenchmarkTarget, import_package, import_transformers
from clearhead.errors import ClearheadError


class CTranslate2Engine(InferenceEngine):
    """A generator of CTranslate2 in float32 or int8."""

    name = "ctranslate2"
    cache_element_bytes = 4  # on a CPU it computes in float32, whatever the weights

    def __init__(self, target: BenchmarkTarget, weights: str):
        package = import_package("ctranslate2", "ctranslate2")
        import_transformers()  # its converter needs it
        self.weights, self.last_id = weights, target.model.config.vocab_size - 1
        output = target.folder / f"ctranslate2-{weights}"
        folder = convert_to_ctranslate2(target.huggingface_folder(), output, weights)
        self.generator = package.Generator(
            str(folder),
            device=target.device.type,
            compute_type=weights,
            inter_threads=1,
            intra_threads=target.num_threads,
        )
        fraction_read = weight_bytes_read(target.network) / total_weight_bytes(target.network)
        self.weight_bytes = int((folder / "model.bin").stat().st_size * fraction_read)

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> None:
        def on_step(result: Any) -> bool:
            on_token(result.token_id)
            return False

        self.generator.generate_batch(
            [[str(token) for token in prompt]],
            include_prompt_in_result=False,
            min_length=num_tokens,
            max_length=num_tokens,
            end_token=[self.last_id],  # some token must be the end; the last of a vocabulary hardly ever occurs
            callback=on_step,
        )


def convert_to_ctranslate2(source: Path, output: Path, weights: str) -> Path:
    """Convert a folder of transformers to one of CTranslate2; return the latter."""
    converters = import_package("ctranslate2.converters", "ctranslate2")
    converter = type("Converter", (converters.TransformersConverter,), {"load_tokenizer": _load_id_tokenizer})
    try:
        converter(str(source)).convert(str(output), quantization=weights)
    except (ValueError, NotImplementedError, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0].split(" (")[0]
        raise ClearheadError(f"its converter does not support this model: {reason}") from None
    return output


def _load_id_tokenizer(converter: Any, tokenizer_class: type, folder: str, **options: Any) -> Any:
    """Return what the converter uses of a tokenizer, with token ids as texts."""
    config = import_transformers().AutoConfig.from_pretrained(folder)
    texts = [str(token) for token in range(config.vocab_size)]
    if config.is_encoder_decoder:
        texts[-1] = "<pad>"  # Marian's last token: the converter removes it with its weights
    eos_ids = config.eos_token_id or 0
    eos_id = eos_ids[0] if isinstance(eos_ids, list) else eos_ids
    return SimpleNamespace(
        get_vocab=lambda: {text: token for token, text in enumerate(texts)},
        convert_ids_to_tokens=lambda token: texts[token],
        bos_token=texts[config.bos_token_id or 0],
        eos_token=texts[eos_id],
        unk_token=texts[0],
    )
