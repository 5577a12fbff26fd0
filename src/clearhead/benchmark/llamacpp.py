"""llama.cpp as a peer, through llama-cpp-python: the .gguf measured, or the BF16, Q8_0 and Q4_0 it makes of that.

    engine = LlamaCpp(subject, "int4")

What it makes is kept (`home()/benchmark`), named by a digest of where they came from.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from clearhead.benchmark.engine import Engine, Hear
from clearhead.benchmark.subject import Subject, import_peer
from clearhead.benchmark.traffic import weights_held, weights_read
from clearhead.errors import ClearheadError
from clearhead.files import atomic_write
from clearhead.home import home

KINDS = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
CHUNK = 512  # of a prompt, at a time; its own default for the micro-batch


class LlamaCpp(Engine):
    name = "llama.cpp"
    cache_element_bytes = 2  # float16, its default

    def __init__(self, subject: Subject, weights: str):
        package = import_peer("llama_cpp", "llama-cpp-python")
        source = subject.gguf_file()
        on_gpu = subject.device.type == "cuda"
        if on_gpu and not package.llama_supports_gpu_offload():
            raise ClearheadError("the llama-cpp-python installed here was built without CUDA")
        self.package, self.weights = package, weights
        file = quantised(package, source, KINDS[weights], subject.num_threads) if weights in KINDS else source
        try:
            self.model = package.Llama(
                str(file),
                n_ctx=subject.capacity,
                n_batch=CHUNK,
                n_ubatch=CHUNK,
                n_threads=subject.num_threads,
                n_threads_batch=subject.num_threads,
                n_gpu_layers=-1 if on_gpu else 0,
                verbose=False,
            )
        except ValueError as error:
            raise ClearheadError(f"it cannot run this model: {error}") from None
        read_share = weights_read(subject.network) / weights_held(subject.network)
        self.weight_bytes = int(package.llama_model_size(self.model.model) * read_share)

    def speak(self, prompt: Sequence[int], num_tokens: int, hear: Hear) -> None:
        self.model.reset()
        self.model.eval(list(prompt))
        hear(token := self.likeliest())
        for _ in range(num_tokens - 1):
            self.model.eval([token])
            hear(token := self.likeliest())

    def likeliest(self) -> int:
        logits = self.package.llama_get_logits_ith(self.model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.model.n_vocab(),)).argmax())


def quantised(package: ModuleType, source: Path, kind: str, num_threads: int) -> Path:
    """The model in this type of block; made once."""
    found = source.stat()
    told = f"{source.resolve()} {found.st_size} {found.st_mtime_ns} {package.__version__}"
    digest = hashlib.sha256(told.encode()).hexdigest()[:12]
    target = home() / "benchmark" / f"{source.stem}-{digest}-{kind}.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    settings = package.llama_model_quantize_default_params()
    settings.ftype = getattr(package, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.allow_requantize, settings.nthread = True, num_threads
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # or it tells of every tensor
    with atomic_write(target) as unfinished:
        if package.llama_model_quantize(os.fsencode(source), os.fsencode(unfinished), settings):
            raise ClearheadError(f"it cannot quantise {source.name} to {kind}")
    return target
