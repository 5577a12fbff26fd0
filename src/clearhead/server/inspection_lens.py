"""The logit lens as JSON data: a table over positions and depths, and the tokens that rank high at any depth.

lens_data(trace, texts, every=3, top=5, positions=[8, 9]); track_data(trace, texts, position=-1, count=8)
"""

from collections.abc import Sequence
from typing import Any

from clearhead.errors import require
from clearhead.inspection import LensPrediction, Trace, logit_lens
from clearhead.server.inspection_json import TokenTexts, number, numbers

_MAX_CELLS = 4096  # positions × depths of one answer; each costs a product with the vocabulary
_MAX_TOP, _MAX_TRACKS = 20, 16


def lens_data(trace: Trace, texts: TokenTexts, every: int, top: int, positions: Sequence[int]) -> dict[str, Any]:
    """Return the most likely tokens after both branches of every n-th layer, at some positions."""
    num_depths = 2 * -(-trace.num_layers // max(every, 1))
    num_cells = num_depths * len(positions)
    require(
        num_cells <= _MAX_CELLS,
        f"{len(positions)} positions at {num_depths} depths are {num_cells:,} predictions; "
        f"ask for at most {_MAX_CELLS // num_depths} positions",
    )
    require(1 <= top <= _MAX_TOP, f"top is {top}; it must be from 1 to {_MAX_TOP}")
    stages = logit_lens(trace, top=min(top, trace.config.vocab_size), every=every, positions=positions)
    found = [token for stage in stages for token in stage.top_ids.flatten().tolist()]
    return {
        "positions": [trace.resolve_position(position) for position in positions],
        "stages": [
            {
                "layer": stage.layer,
                "after": stage.after,
                "ids": stage.top_ids.tolist(),
                "probabilities": numbers(stage.top_probabilities),
                "entropy": numbers(stage.entropy),
            }
            for stage in stages
        ],
        "texts": texts.texts(found),
    }


def track_data(trace: Trace, texts: TokenTexts, position: int, count: int) -> dict[str, Any]:
    """Return the tokens that rank highest at any depth of one position, with rank and probability at every depth.

    Half of them are the model's own predictions, so that these are always among them.
    """
    require(1 <= count <= _MAX_TRACKS, f"count is {count}; it must be from 1 to {_MAX_TRACKS}")
    position = trace.resolve_position(position)
    stages = logit_lens(trace, top=trace.config.vocab_size, positions=[position])
    tracks = []
    for token in _choose_tokens(stages, count):
        ranks = [int((stage.top_ids[0] == token).nonzero()[0, 0]) for stage in stages]
        values = [number(float(stage.top_probabilities[0, rank])) for stage, rank in zip(stages, ranks, strict=True)]
        tracks.append({"id": token, "text": texts.text(token), "ranks": ranks, "probabilities": values})
    return {
        "position": position,
        "stages": [{"layer": stage.layer, "after": stage.after} for stage in stages],
        "tracks": tracks,
    }


def _choose_tokens(stages: Sequence[LensPrediction], count: int) -> list[int]:
    """Return the first predictions of the last stage, then the tokens that lead any stage with most probability."""
    final: list[int] = stages[-1].top_ids[0, : -(-count // 2)].tolist()
    best: dict[int, tuple[int, float]] = {}  # by token: its best rank, and minus its probability there
    for stage in stages:
        leaders = zip(stage.top_ids[0, :count].tolist(), stage.top_probabilities[0, :count].tolist(), strict=True)
        for rank, (token, probability) in enumerate(leaders):
            best[token] = min(best.get(token, (rank, -probability)), (rank, -probability))
    others = [token for token in sorted(best, key=lambda token: best[token]) if token not in final]
    return [*final, *others][:count]
