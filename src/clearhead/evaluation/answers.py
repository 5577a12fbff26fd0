"""Generate answers and compare them with references: translations, and pairs of any kind.

    result = evaluate_translation(model, read_parallel("test.en", "test.de"), beams=5); result["bleu"]
    result = evaluate_pairs(model, read_table("words.tsv"), unit="character"); result["exact_match"]

BLEU (Papineni et al. 2002) and chrF (Popović 2015) are computed by sacrebleu on detokenized text; its signature makes
scores comparable (Post 2018).
"""

import json
from collections.abc import Sequence
from operator import ne
from typing import Any, Literal, get_args

from clearhead.api import Model
from clearhead.architecture import LearnedPositions, ModelConfig
from clearhead.data import Pair
from clearhead.errors import ClearheadError, require, unknown_name
from clearhead.evaluation.result import EvaluationResult, Metric, Progress, mean_metric, ratio_metric
from clearhead.generation import require_tokenizer
from clearhead.model import RecurrentConfig

BATCH_SIZE = 32
MAX_NEW_TOKENS = 256
_NUM_RESAMPLES = 1000
_NORMAL_95 = 1.96  # half the width of a 95 % interval in standard errors
Unit = Literal["word", "character"]


def generate_answers(
    model: Model,
    sources: Sequence[str],
    beams: int = 1,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress | None = None,
) -> tuple[list[str], int]:
    """Return an answer to each source, by greedy decoding or beam search, and the number of truncated sources.

    Sources of similar length are read in one batch. The answer to a source without tokens is empty. A source longer
    than the learned positions is truncated: its beginning and its last token, often the end token, are read.
    """
    tokenizer = require_tokenizer(model.tokenizer)  # model.encode refuses a text of unknown characters only
    full_ids = [tokenizer.encode(source) for source in sources]
    max_length = _max_source_length(model.network.config)
    ids = [
        one if max_length is None or len(one) <= max_length else [*one[: max_length - 1], one[-1]] for one in full_ids
    ]
    ordered = sorted((index for index in range(len(ids)) if ids[index]), key=lambda index: -len(ids[index]))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens} | ({"beams": beams} if beams != 1 else {})
    texts = {index: "" for index in range(len(ids)) if not ids[index]}
    for start in range(0, len(ordered), BATCH_SIZE):
        batch = ordered[start : start + BATCH_SIZE]
        generations = model.generate_many([ids[index] for index in batch], **options)
        texts |= {index: generation.text for index, generation in zip(batch, generations, strict=True)}
        if progress is not None:
            progress(len(texts), len(ids))
    return [texts[index] for index in range(len(ids))], sum(map(ne, full_ids, ids))


def _max_source_length(config: ModelConfig | RecurrentConfig) -> int | None:
    """Return the number of learned positions for a source; None if its length is not limited."""
    if isinstance(config, RecurrentConfig):
        return None
    positions = (config.encoder or config.output_stack).token_embedding.positions
    return positions.num_positions if isinstance(positions, LearnedPositions) else None


def evaluate_translation(
    model: Model,
    sentences: Sequence[Pair],
    beams: int = 5,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Return BLEU and chrF, from 0 to 100, of a model's translations of (source, reference) pairs."""
    _check_can_translate(model.network.config, beams)
    require(len(sentences) > 0, "there is no sentence to translate; give at least one")
    sacrebleu = _sacrebleu_metrics()
    sources, references = [source for source, _ in sentences], [reference for _, reference in sentences]
    translations, num_truncated = generate_answers(model, sources, beams, max_new_tokens, progress)
    settings = _answer_settings(beams, num_truncated)
    return _score_translations(translations, references, sacrebleu, settings)


def _answer_settings(beams: int, num_truncated: int) -> dict[str, int | str]:
    """Return the settings of generated answers that a result reports."""
    settings: dict[str, int | str] = {"beams": beams}
    return settings | {"sources_truncated": num_truncated} if num_truncated else settings


def _check_can_translate(config: ModelConfig | RecurrentConfig, beams: int) -> None:
    """Raise ClearheadError unless the model is an encoder-decoder that supports this number of beams."""
    if isinstance(config, RecurrentConfig):
        require(beams == 1, "a recurrent network does not support beam search; set beams to 1")
    elif not config.is_encoder_decoder:
        raise ClearheadError(
            "translation needs an encoder-decoder model, since a decoder would only continue the sentence; evaluate "
            "this model with perplexity or pairs"
        )


def _sacrebleu_metrics() -> dict[str, Any]:
    """Return the metrics of sacrebleu by name."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ModuleNotFoundError:
        raise ClearheadError('BLEU and chrF need sacrebleu; run: pip install "clearhead[eval]"') from None
    return {"bleu": _with_float_counts(BLEU()), "chrf": _with_float_counts(CHRF())}


def _with_float_counts(metric: Any) -> Any:
    """Make a metric of sacrebleu compute with Python floats.

    sacrebleu 2.6 resamples in float32 and scores 0.0 if nothing matches; it cannot average the two types.
    """
    original = metric._compute_score_from_stats
    metric._compute_score_from_stats = lambda counts: original([float(count) for count in counts])
    return metric


def _score_translations(
    translations: Sequence[str], references: Sequence[str], sacrebleu: dict[str, Any], settings: dict[str, int | str]
) -> EvaluationResult:
    """Return the metrics of sacrebleu with bootstrap standard errors, and their signatures as settings."""
    metrics, signatures = [], {}
    num_resamples = _NUM_RESAMPLES if len(translations) > 1 else 1
    for name, metric in sacrebleu.items():
        score = metric.corpus_score(list(translations), [list(references)], n_bootstrap=num_resamples)
        half_width = json.loads(score.format(is_json=True, signature=str(metric.get_signature()))).get("confidence_var")
        metrics.append(Metric(name, score.score, None if half_width is None else half_width / _NORMAL_95))
        signatures[f"{name}_signature"] = str(metric.get_signature())
    return EvaluationResult("translation", len(translations), tuple(metrics), settings | signatures)


def evaluate_pairs(
    model: Model,
    rows: Sequence[Pair],
    unit: Unit = "word",
    beams: int = 1,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Return the exact match rate of answers to (source, target) pairs, and their edits per unit of the target.

    The edit distance is that of Levenshtein (1966). A source with several targets is answered once, and any of its
    targets is correct. If the sources are words and the targets pronunciations, 1 - exact_match is called the word
    error rate in the literature.
    """
    if unit not in get_args(Unit):
        raise unknown_name("unit", unit, get_args(Unit))
    targets: dict[str, list[str]] = {}
    for source, target in rows:
        targets.setdefault(source, []).append(target)
    answers, num_truncated = generate_answers(model, list(targets), beams, max_new_tokens, progress)
    distances = [_nearest_target(*pair, unit) for pair in zip(answers, targets.values(), strict=True)]
    edits, lengths = [distance for distance, _ in distances], [length for _, length in distances]
    if not any(lengths):
        raise ClearheadError("there is no target, or all targets are empty; give at least one that is not empty")
    exact_match = mean_metric("exact_match", [distance == 0 for distance in edits])
    metrics = (exact_match, ratio_metric(f"{unit}_error_rate", edits, lengths))
    return EvaluationResult("pairs", len(targets), metrics, _answer_settings(beams, num_truncated) | {"unit": unit})


def _nearest_target(answer: str, targets: Sequence[str], unit: Unit) -> tuple[int, int]:
    """Return the edit distance to the nearest target and the target's length in units."""
    answer_units = _split_units(answer, unit)
    all_target_units = [_split_units(target, unit) for target in targets]
    return min((edit_distance(answer_units, target_units), len(target_units)) for target_units in all_target_units)


def _split_units(text: str, unit: Unit) -> Sequence[str]:
    """Return the words or characters of a text; whitespace is stripped at the ends and collapsed elsewhere."""
    words = text.split()
    return words if unit == "word" else " ".join(words)


def edit_distance(source: Sequence[str], target: Sequence[str]) -> int:
    """Return the number of insertions, deletions and replacements that turn `source` into `target`.

    costs[j] is the distance between the part of `source` read so far and the first j units of `target`.
    """
    costs = list(range(len(target) + 1))
    for row, source_unit in enumerate(source, start=1):
        above, costs[0] = costs[0], row
        for column, target_unit in enumerate(target, start=1):
            replaced = above + (source_unit != target_unit)
            above = costs[column]
            costs[column] = min(replaced, above + 1, costs[column - 1] + 1)
    return costs[-1]
