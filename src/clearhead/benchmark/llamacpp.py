"""llama.cpp as an engine, through llama-cpp-python: a .gguf file, or the BF16, Q8_0 and Q4_0 files it quantizes to.

    engine = LlamaCppEngine(target, "int4")

Quantized files are kept in `home()/benchmark`, named by a digest of their source.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from clearhead.benchmark.inference_engine import InferenceEngine, OnToken
from clearhead.benchmark.memory_traffic import total_weight_bytes, weight_bytes_read
from clearhead.benchmark.target import BenchmarkTarget, import_package
from clearhead.errors import ClearheadError
from clearhead.files import atomic_write
from clearhead.home import home

BLOCK_TYPES = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
_PROMPT_CHUNK = 512  # tokens; llama.cpp's default for the micro-batch


class LlamaCppEngine(InferenceEngine):
    """A model of llama.cpp."""

    name = "llama.cpp"
    cache_element_bytes = 2  # float16, its default

    def __init__(self, target: BenchmarkTarget, weights: str):
        package = import_package("llama_cpp", "llama-cpp-python")
        source = target.gguf_file()
        on_gpu = target.device.type == "cuda"
        if on_gpu and not package.llama_supports_gpu_offload():
            raise ClearheadError("the installed llama-cpp-python was built without CUDA")
        self.package, self.weights = package, weights
        file = source if weights == "stored" else quantize(package, source, BLOCK_TYPES[weights], target.num_threads)
        try:
            self.model = package.Llama(
                str(file),
                n_ctx=target.capacity,
                n_batch=_PROMPT_CHUNK,
                n_ubatch=_PROMPT_CHUNK,
                n_threads=target.num_threads,
                n_threads_batch=target.num_threads,
                n_gpu_layers=-1 if on_gpu else 0,
                verbose=False,
            )
        except ValueError as error:
            raise ClearheadError(f"it cannot run this model: {error}") from None
        fraction_read = weight_bytes_read(target.network) / total_weight_bytes(target.network)
        self.weight_bytes = int(package.llama_model_size(self.model.model) * fraction_read)

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> None:
        self.model.reset()
        self.model.eval(list(prompt))
        on_token(token := self.most_likely_token())
        for _ in range(num_tokens - 1):
            self.model.eval([token])
            on_token(token := self.most_likely_token())

    def most_likely_token(self) -> int:
        """Return the argmax of the last logits."""
        logits = self.package.llama_get_logits_ith(self.model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.model.n_vocab(),)).argmax())


def quantize(package: ModuleType, source: Path, block_type: str, num_threads: int) -> Path:
    """Return the path of the model in this block type; quantize it if that has not been done before."""

    def run(output: Path) -> None:
        settings = package.llama_model_quantize_default_params()
        settings.ftype = getattr(package, f"LLAMA_FTYPE_MOSTLY_{block_type}")
        settings.allow_requantize, settings.nthread = True, num_threads
        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # it would log every tensor
        if package.llama_model_quantize(os.fsencode(source), os.fsencode(output), settings):
            raise ClearheadError(f"it cannot quantize {source.name} to {block_type}")

    return quantized_file(source, block_type, package.__version__, run)


def quantized_file(source: Path, block_type: str, version: str, run: Callable[[Path], object]) -> Path:
    """Return the path of a file in this block type; call `run` to write it if that has not been done before."""
    status = source.stat()
    identity = f"{source.resolve()} {status.st_size} {status.st_mtime_ns} {version}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    output = home() / "benchmark" / f"{source.stem}-{digest}-{block_type}.gguf"
    if not output.is_file():
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(output) as unfinished:
            run(unfinished)
    return output
