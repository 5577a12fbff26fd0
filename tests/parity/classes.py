"""The classes of transformers that each model type has besides its main one, and which of them are not read.

further_classes("roberta")    # ("RobertaForCausalLM", "RobertaForSequenceClassification", ...)
"""

from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from tests.parity.config_types import TYPES

KINDS = ("", "FOR_PRETRAINING", "FOR_CAUSAL_LM", "FOR_MASKED_LM", "FOR_SEQ_TO_SEQ_CAUSAL_LM", "FOR_TEXT_ENCODING")
KINDS += ("FOR_SEQUENCE_CLASSIFICATION", "FOR_TOKEN_CLASSIFICATION")
KINDS += ("FOR_QUESTION_ANSWERING", "FOR_MULTIPLE_CHOICE", "FOR_NEXT_SENTENCE_PREDICTION")
# Heads that we do not have, by the end of a class's name
REFUSED_ENDS = ("ForQuestionAnswering", "QuestionAnsweringSimple", "ForMultipleChoice", "ForNextSentencePrediction")
# The decoder of an encoder-decoder without cross-attention, and heads that classify with other modules than most
REFUSED = {
    *(f"{name}ForCausalLM" for name in ("Bart", "MBart", "Marian", "Pegasus", "BigBirdPegasus", "Whisper")),
    *(f"{name}ForSequenceClassification" for name in ("Bart", "MBart", "BigBirdPegasus", "T5", "MT5", "UMT5")),
    *(f"{name}ForTokenClassification" for name in ("T5", "MT5", "UMT5")),
}


def is_refused(class_name: str) -> bool:
    """Return whether a class is not read; an error says so."""
    return class_name in REFUSED or class_name.endswith(REFUSED_ENDS)


def further_classes(model_type: str) -> tuple[str, ...]:
    """Return the classes of a type, but for the main one, in the order of their names."""
    found: set[str] = set()
    for kind in KINDS:
        names: Any = getattr(modeling_auto, "_".join(part for part in ("MODEL", kind, "MAPPING_NAMES") if part))
        entry = names.get(model_type, ())
        found |= {entry} if isinstance(entry, str) else set(entry)
    found.discard(TYPES[model_type][0])
    return tuple(sorted(name for name in found if hasattr(transformers, name)))
