"""Who takes part: ours in each weight format asked for, then the peers in those that they have.

    engines = line_up(subject, ["bfloat16", "int4"], ["llama.cpp"], tell=print)

Who cannot take part is told in one sentence, and the others go on.
"""

from collections.abc import Callable, Sequence

from clearhead.benchmark.ctranslate2 import CTranslate2
from clearhead.benchmark.engine import WEIGHTS, Engine
from clearhead.benchmark.huggingface import HuggingFace
from clearhead.benchmark.llamacpp import LlamaCpp
from clearhead.benchmark.ours import open_ours
from clearhead.benchmark.subject import Subject
from clearhead.errors import ClearheadError, unknown_name

Open = Callable[[Subject, str], Engine]

PEERS: dict[str, tuple[Open, tuple[str, ...]]] = {
    "huggingface": (HuggingFace, ("float32", "bfloat16")),
    "llama.cpp": (LlamaCpp, ("bfloat16", "int8", "int4", "stored")),
    "ctranslate2": (CTranslate2, ("float32", "int8")),
}


def line_up(
    subject: Subject, weights: Sequence[str], against: Sequence[str], tell: Callable[[str], object]
) -> list[Engine]:
    check_names(weights, against)
    subject.check()
    engines: list[Engine] = []
    for name, (opens, known) in {"clearhead": (open_ours, WEIGHTS), **{peer: PEERS[peer] for peer in against}}.items():
        if not set(weights) & set(known):
            tell(f"{name} is left out: of the weights asked for it runs none, but {' and '.join(known)}")
        left_out: dict[str, list[str]] = {}  # by reason
        for kind in weights:
            if kind not in known:
                continue
            try:
                engines.append(opens(subject, kind))
            except ClearheadError as error:
                left_out.setdefault(str(error), []).append(kind)
                continue
            if (remark := engines[-1].remark) is not None:
                tell(f"{engines[-1]} {remark}")
        for reason, kinds in left_out.items():
            tell(f"{name} {', '.join(kinds)} is left out: {reason}")
    if not engines:
        raise ClearheadError("no engine can run this model here; see the reasons above")
    return engines


def check_names(weights: Sequence[str], against: Sequence[str]) -> None:
    if not weights:
        raise ClearheadError(f"there are no weights to measure; known are: {', '.join(WEIGHTS)}")
    for kind in weights:
        if kind not in WEIGHTS:
            raise unknown_name("weight format", kind, WEIGHTS)
    for peer in against:
        if peer not in PEERS:
            raise unknown_name("peer", peer, PEERS)
