"""Open the engines to measure: Clearhead in each requested weight format, then others in the formats they support.

    engines = open_engines(target, ["bfloat16", "int4"], ["llama.cpp"], notify=print)    # one text at a time
    engines = open_serving_engines(target, ["bfloat16"], ["llama.cpp"], notify=print)    # many at once

An engine that cannot run is skipped with a one-sentence note.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from clearhead.benchmark.clearhead_engine import open_clearhead
from clearhead.benchmark.clearhead_server import ClearheadServer
from clearhead.benchmark.clearhead_serving import ClearheadServing
from clearhead.benchmark.ctranslate2 import CTranslate2Engine
from clearhead.benchmark.huggingface import HuggingFaceEngine
from clearhead.benchmark.huggingface_serving import HuggingFaceServing
from clearhead.benchmark.inference_engine import WEIGHTS, InferenceEngine
from clearhead.benchmark.llamacpp import LlamaCppEngine
from clearhead.benchmark.llamacpp_server import LlamaServer
from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.benchmark.target import BenchmarkTarget
from clearhead.errors import ClearheadError, unknown_name

E = TypeVar("E", InferenceEngine, ServingEngine)
_Candidates = Mapping[str, tuple[Callable[[BenchmarkTarget, str], E], tuple[str, ...]]]  # with the weights they support

_OTHER_ENGINES: _Candidates[InferenceEngine] = {
    "huggingface": (HuggingFaceEngine, ("float32", "bfloat16")),
    "llama.cpp": (LlamaCppEngine, ("bfloat16", "int8", "int4", "stored")),
    "ctranslate2": (CTranslate2Engine, ("float32", "int8")),
}
_OTHER_SERVERS: _Candidates[ServingEngine] = {
    "huggingface": (HuggingFaceServing, ("float32", "bfloat16")),
    "llama.cpp": (LlamaServer, ("bfloat16", "int8", "int4", "stored")),
}


def open_engines(
    target: BenchmarkTarget, weights: Sequence[str], against: Sequence[str], notify: Callable[[str], object]
) -> list[InferenceEngine]:
    """Return Clearhead and the engines named in `against`; call `notify` with the reason for each one skipped."""
    check_engine_names(weights, against)
    candidates = {"clearhead": (open_clearhead, WEIGHTS), **{name: _OTHER_ENGINES[name] for name in against}}
    return _open_candidates(candidates, target, weights, notify)


def open_serving_engines(
    target: BenchmarkTarget,
    weights: Sequence[str],
    against: Sequence[str],
    notify: Callable[[str], object],
    over_http: bool = False,
) -> list[ServingEngine]:
    """Return Clearhead and the named engines for many requests at once. They do not load their weights yet.

    over_http: add `clearhead serve`, a process of its own, as llama.cpp's server is.
    """
    check_engine_names(weights, against, _OTHER_SERVERS)
    candidates: dict[str, tuple[Callable[[BenchmarkTarget, str], ServingEngine], tuple[str, ...]]] = {
        "clearhead": (ClearheadServing, WEIGHTS)
    }
    if over_http:
        candidates[ClearheadServer.name] = (ClearheadServer, WEIGHTS)
    candidates |= {name: _OTHER_SERVERS[name] for name in against}
    return _open_candidates(candidates, target, weights, notify)


def _open_candidates(
    candidates: _Candidates[E], target: BenchmarkTarget, weights: Sequence[str], notify: Callable[[str], object]
) -> list[E]:
    """Create each candidate in the weight formats that it supports."""
    target.check()
    engines: list[E] = []
    for name, (open_engine, supported) in candidates.items():
        if not set(weights) & set(supported):
            notify(f"skipped {name}: it supports none of the requested weights, only {' and '.join(supported)}")
        skipped: dict[str, list[str]] = {}  # weight formats by reason
        for kind in weights:
            if kind not in supported:
                continue
            try:
                engines.append(open_engine(target, kind))
            except ClearheadError as error:
                skipped.setdefault(str(error), []).append(kind)
                continue
            if (note := engines[-1].note) is not None:
                notify(f"{engines[-1]} {note}")
        for reason, kinds in skipped.items():
            notify(f"skipped {name} {', '.join(kinds)}: {reason}")
    if not engines:
        raise ClearheadError("no engine can run this model here; the notes above give the reasons")
    return engines


def check_engine_names(
    weights: Sequence[str], against: Sequence[str], known: Iterable[str] = tuple(_OTHER_ENGINES)
) -> None:
    """Raise ClearheadError for an unknown weight format or engine."""
    if not weights:
        raise ClearheadError(f"there are no weights to measure; choose from {', '.join(WEIGHTS)}")
    for kind in weights:
        if kind not in WEIGHTS:
            raise unknown_name("weight format", kind, WEIGHTS)
    for name in against:
        if name not in known:
            raise unknown_name("engine", name, known)
