"""What a model writes beside what it should have written: translations, and pairs of any kind.

    translation(model, read_parallel("test.en", "test.de"), beams=5)["bleu"]
    pairs(model, read_table("words.tsv"), unit="character")["exact_match"]

BLEU (Papineni et al. 2002) and chrF (Popović 2015) are sacrebleu's, on text as it comes out of the tokenizer; with its
signature two numbers can be compared (Post 2018).
"""

import json
from collections.abc import Sequence
from operator import ne
from typing import Any, Literal, get_args

from clearhead.api import Model
from clearhead.architecture import LearnedPositions, ModelConfig
from clearhead.data import Pair
from clearhead.errors import ClearheadError, require, unknown_name
from clearhead.evaluation.result import Measure, Progress, Result, measure, rate
from clearhead.generation import require_tokenizer
from clearhead.model import RecurrentConfig

BATCH_SIZE = 32
MAX_NEW_TOKENS = 256
NUM_RESAMPLES = 1000
NORMAL_95 = 1.96  # standard errors from the middle to the end of a 95 % interval
Unit = Literal["word", "character"]


def answers(
    model: Model,
    sources: Sequence[str],
    beams: int = 1,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress | None = None,
) -> tuple[list[str], int]:
    """The best text of `beams` for each source, greedy with one; sources of similar length go together.

    To a source without tokens the answer is as empty. Of one that is longer than a table of positions its beginning is
    read, and its last token, often an end; how many were cut so comes with the answers.
    """
    tokenizer = require_tokenizer(model.tokenizer)  # not model.encode, which refuses a text of unknown characters alone
    whole = [tokenizer.encode(source) for source in sources]
    longest = most_tokens(model.network.config)
    ids = [one if longest is None or len(one) <= longest else [*one[: longest - 1], one[-1]] for one in whole]
    ordered = sorted((number for number in range(len(ids)) if ids[number]), key=lambda number: -len(ids[number]))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens} | ({"beams": beams} if beams != 1 else {})
    texts = {number: "" for number in range(len(ids)) if not ids[number]}
    for start in range(0, len(ordered), BATCH_SIZE):
        batch = ordered[start : start + BATCH_SIZE]
        made = model.generate_many([ids[number] for number in batch], **options)
        texts |= {number: generation.text for number, generation in zip(batch, made, strict=True)}
        if progress is not None:
            progress(len(texts), len(ids))
    return [texts[number] for number in range(len(ids))], sum(map(ne, whole, ids))


def most_tokens(config: ModelConfig | RecurrentConfig) -> int | None:
    """The longest source that can be read; None: there is no such limit."""
    if isinstance(config, RecurrentConfig):
        return None
    positions = (config.encoder or config.output_stack).embedding.positions
    return positions.num_positions if isinstance(positions, LearnedPositions) else None


def translation(
    model: Model,
    sentences: Sequence[Pair],
    beams: int = 5,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress | None = None,
) -> Result:
    """BLEU and chrF from 0 to 100."""
    check_translates(model.network.config, beams)
    require(len(sentences) > 0, "there is no sentence to translate; give one or more")
    metrics = sacrebleu_metrics()
    made, num_cut = answers(model, [source for source, _ in sentences], beams, max_new_tokens, progress)
    return judge_translation(made, [target for _, target in sentences], metrics, how(beams, num_cut))


def how(beams: int, num_cut: int) -> dict[str, int | str]:
    """The settings of answers."""
    settings: dict[str, int | str] = {"beams": beams}
    return settings | {"sources_cut": num_cut} if num_cut else settings


def check_translates(config: ModelConfig | RecurrentConfig, beams: int) -> None:
    if isinstance(config, RecurrentConfig):
        require(beams == 1, "a recurrent network does not search; give beams as 1")
    elif not config.is_encoder_decoder:
        raise ClearheadError(
            "translation is for an encoder-decoder, and this model has one half alone: a decoder would go on with the "
            "sentence in its own language; perplexity and pairs can judge it"
        )


def sacrebleu_metrics() -> dict[str, Any]:
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ModuleNotFoundError:
        raise ClearheadError('BLEU and chrF need sacrebleu: pip install "clearhead[eval]"') from None
    return {"bleu": in_floats(BLEU()), "chrf": in_floats(CHRF())}


def in_floats(metric: Any) -> Any:
    """sacrebleu 2.6 resamples in float32, scores 0.0 where nothing matches, and has no mean of the two kinds."""
    of_counts = metric._compute_score_from_stats
    metric._compute_score_from_stats = lambda counts: of_counts([float(count) for count in counts])
    return metric


def judge_translation(
    made: Sequence[str], wanted: Sequence[str], metrics: dict[str, Any], settings: dict[str, int | str]
) -> Result:
    measures, signatures = [], {}
    for name, metric in metrics.items():
        found = metric.corpus_score(list(made), [list(wanted)], n_bootstrap=NUM_RESAMPLES if len(made) > 1 else 1)
        half_width = json.loads(found.format(is_json=True, signature=str(metric.get_signature()))).get("confidence_var")
        measures.append(Measure(name, found.score, None if half_width is None else half_width / NORMAL_95))
        signatures[f"{name}_signature"] = str(metric.get_signature())
    return Result("translation", len(made), tuple(measures), settings | signatures)


def pairs(
    model: Model,
    rows: Sequence[Pair],
    unit: Unit = "word",
    beams: int = 1,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: Progress | None = None,
) -> Result:
    """How often an answer is right, and the edits for each unit of what was wanted (Levenshtein 1966).

    A source with several targets is asked once, and any of them is right. Where a source is a word and its target a
    pronunciation, 1 - exact_match is what is known as its word error rate.
    """
    if unit not in get_args(Unit):
        raise unknown_name("unit", unit, get_args(Unit))
    wanted: dict[str, list[str]] = {}
    for source, target in rows:
        wanted.setdefault(source, []).append(target)
    made, num_cut = answers(model, list(wanted), beams, max_new_tokens, progress)
    judged = [nearest(answer, targets, unit) for answer, targets in zip(made, wanted.values(), strict=True)]
    edits, lengths = [num for num, _ in judged], [length for _, length in judged]
    if not any(lengths):
        raise ClearheadError("there is no target, or all are empty: nothing to compare answers with")
    measures = (measure("exact_match", [num == 0 for num in edits]), rate(f"{unit}_error_rate", edits, lengths))
    return Result("pairs", len(wanted), measures, how(beams, num_cut) | {"unit": unit})


def nearest(answer: str, targets: Sequence[str], unit: Unit) -> tuple[int, int]:
    """Edits to the target that takes fewest, and how many units it has; space at the ends and its width is no edit."""
    found = [(units(target, unit), units(answer, unit)) for target in targets]
    return min((num_edits(have, want), len(want)) for want, have in found)


def units(text: str, unit: Unit) -> Sequence[str]:
    words = text.split()
    return words if unit == "word" else " ".join(words)


def num_edits(have: Sequence[str], want: Sequence[str]) -> int:
    """Insertions, deletions and replacements that make one of the other.

    costs[j] is the number for the part of `have` read so far and the first j of `want`.
    """
    costs = list(range(len(want) + 1))
    for row, own in enumerate(have, start=1):
        above, costs[0] = costs[0], row
        for column, other in enumerate(want, start=1):
            replaced = above + (own != other)
            above = costs[column]
            costs[column] = min(replaced, above + 1, costs[column - 1] + 1)
    return costs[-1]
