"""Save a model as a GGUF file, for llama.cpp and the programs built on it.

save_gguf(clearhead.load("smollm2"), "smollm2.gguf", "q4_k_m", calibration_text=Path("book.txt").read_text())
"""

from pathlib import Path

from clearhead.api.model import Model
from clearhead.checkpoint import Progress, measure_importance
from clearhead.checkpoint import save_gguf as write_model
from clearhead.errors import ClearheadError
from clearhead.files import check_output_path
from clearhead.home import expand_user


def save_gguf(
    model: Model,
    path: str | Path,
    file_type: str = "q8_0",
    *,
    calibration_text: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a GGUF file, atomically: q8_0, q6_k, q5_k_m, q4_k_m, q4_0, bf16 or f16. Return its path.

    The model must have full weights. With a calibration text, rounding errors are weighted by how large the inputs of
    each weight are on this text.
    """
    path = expand_user(path)
    check_output_path(path, (".gguf",))
    importance = None
    if calibration_text is not None:
        if model.tokenizer is None:
            raise ClearheadError("a model without a tokenizer cannot be calibrated on a text; leave out the text")
        importance = measure_importance(model.network, model.tokenizer.encode(calibration_text))
    write_model(
        path,
        model.network,
        model.tokenizer,
        file_type=file_type,
        special_ids=model.special_ids,
        importance=importance,
        sentence=model.sentence,
        progress=progress,
    )
    return path
