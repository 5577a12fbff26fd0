"""Answer the questions of the page about one model: JSON objects in, JSON objects out, no HTTP.

    Inspector(model, "smollm2").answer("head", {"tokens": [1, 2, 3], "view": 0, "layer": 3, "head": 2})

Every question names the text as token ids. The last few traces are kept, so that a question computes only the layer,
the head or the positions that it asks for. An inspector is used by one thread at a time.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clearhead.api import Model
from clearhead.errors import ClearheadError, require, unknown_name
from clearhead.inspection import (
    Trace,
    ablate_parts,
    attention_shares,
    attribute_logit,
    most_likely,
    patch,
    score_tokens,
    thumbnails,
)
from clearhead.parallel import is_divided
from clearhead.server.inspection_fields import MAX_TOKENS, Fields
from clearhead.server.inspection_json import (
    TokenTexts,
    array_data,
    bytes_of,
    candidates_data,
    effect_data,
    number,
    numbers,
)
from clearhead.server.inspection_lens import lens_data, track_data
from clearhead.server.inspection_traces import TraceStore
from clearhead.server.model_json import model_data
from clearhead.server.request_cost import cost_data
from clearhead.server.training_runs import TrainingRuns
from clearhead.tokenization import render_chat

_MAX_SHARE_CELLS = 128 * 128  # entries per head; for longer texts, sorting the heads by pattern takes seconds

_WITHOUT_NETWORK = ("model", "encode", "ids", "cost", "runs", "run")  # questions that a shard of a network can answer

Answer = dict[str, Any]


class Inspector:
    """One model, the traces of the texts that were asked about last, and the training runs to show."""

    def __init__(self, model: Model, name: str, runs: Path | None = None):
        self.model, self.name = model, name
        self.texts = TokenTexts(model.tokenizer)
        self._is_divided = is_divided(model.network)
        self.runs = None if runs is None else TrainingRuns(runs)
        self._traces = TraceStore(model)

    def answer(self, question: str, body: Any) -> Answer:
        """Return the answer to a question. Raise ClearheadError if it, or the request, is invalid."""
        if question not in QUESTIONS:
            raise unknown_name("question", question, QUESTIONS)
        fields = Fields(body)
        if self._is_divided and (question not in _WITHOUT_NETWORK or fields.has("source")):
            raise ClearheadError("a model that several processes share cannot be inspected; serve it in one process")
        return QUESTIONS[question](self, fields)

    def trace(self, tokens: Sequence[int], source: Sequence[int]) -> Trace:
        """Return the trace of token ids."""
        return self._traces.get(tokens, source)


# --- the model and its tokens


def _describe_model(inspector: Inspector, fields: Fields) -> Answer:
    fields.finish()
    return {
        "name": inspector.name,
        **model_data(inspector.model),
        "max_tokens": MAX_TOKENS,
        "has_runs": inspector.runs is not None,
    }


def _encode(inspector: Inspector, fields: Fields) -> Answer:
    """Return the tokens of a text, of messages in the chat template, or of given ids."""
    model, source, prompt = inspector.model, list[int](), None
    if fields.has("messages"):
        messages = fields.messages("messages")
        fields.finish()
        assert model.tokenizer is not None or not model.has_chat_template
        prompt = render_chat(model.tokenizer, messages) if model.tokenizer is not None else ""
        tokens = model.encode(prompt) if model.tokenizer is None else model.tokenizer.encode(prompt, False)
    elif fields.has("tokens"):
        tokens = fields.tokens("tokens")
        fields.finish()
    else:
        text, has_source = fields.text("text"), fields.has("source")
        source_text = fields.text("source", "")
        fields.finish()
        if has_source:
            traced = model.trace(text, source_text)
            tokens, source = traced.tokens, traced.source_tokens or []
        else:
            tokens = model.encode(text)
    return {
        "prompt": prompt,
        "tokens": inspector.texts.describe(tokens),
        "source": inspector.texts.describe(source),
    }


def _find_ids(inspector: Inspector, fields: Fields) -> Answer:
    """Return the ids of tokens that are given by their bytes, as OpenAI's API names tokens; null for unknown ones."""
    pieces = fields.texts("bytes")
    fields.finish()
    starts_text = inspector.model.config.is_encoder_decoder  # what it generates follows no prompt
    ids = [inspector.texts.find(bytes_of(piece), starts_text and not place) for place, piece in enumerate(pieces)]
    return {"ids": ids}


def _open_trace(inspector: Inspector, fields: Fields) -> Answer:
    """Return what a traced text is: its tokens, the kinds of attention, and the most likely next tokens."""
    trace = _read_trace(inspector, fields)
    fields.finish()
    predicted = most_likely(trace.logits_at(-1).float().log_softmax(dim=-1), 8) if _predicts(trace) else []
    return {
        "tokens": inspector.texts.describe(trace.tokens),
        "source": inspector.texts.describe(trace.source_tokens or []),
        "views": [
            {"title": view.title, "num_heads": list(view.num_heads), "crosses": view.rows is not view.columns}
            for view in trace.attention_views()
        ],
        "num_layers": trace.num_layers,
        "next": candidates_data(predicted, inspector.texts),
    }


def _probabilities(inspector: Inspector, fields: Fields) -> Answer:
    """Return the probability of each token given those before it; null for the first, and for an encoder."""
    trace = _read_trace(inspector, fields)
    fields.finish()
    return {"probabilities": [None, *numbers(score_tokens(trace))] if _predicts(trace) else None}


def _predicts(trace: Trace) -> bool:
    return trace.config.head is not None and trace.config.decoder is not None


def _read_trace(inspector: Inspector, fields: Fields, name: str = "tokens") -> Trace:
    source = fields.tokens("source") if fields.has("source") else []
    fields.integers("source")  # marks the field as read where it is null
    return inspector.trace(fields.tokens(name), source)


# --- attention


def _thumbnails(inspector: Inspector, fields: Fields) -> Answer:
    """Return the weights of all heads of one layer, small and as bytes, and what is special about each head."""
    trace, number_of_view, layer = _read_trace(inspector, fields), fields.integer("view", 0), fields.integer("layer")
    fields.finish()
    view = _view(trace, number_of_view)
    matrices = view.matrices(_layer(trace, number_of_view, layer), None)
    weights = matrices.weights.float()
    shares = None
    if len(view.rows) * len(view.columns) <= _MAX_SHARE_CELLS:
        shares = attention_shares(weights, matrices.allowed, view.rows is view.columns)
    return {
        "thumbnails": array_data(thumbnails(weights)),
        "largest": numbers(weights.amax(dim=(1, 2))),
        "shares": None if shares is None else {name: numbers(values) for name, values in shares.patterns.items()},
        "strongest": None if shares is None else shares.strongest_cells,
    }


def _head(inspector: Inspector, fields: Fields) -> Answer:
    """Return the scores, the mask and the weights of one head."""
    trace, view, layer = _read_trace(inspector, fields), fields.integer("view", 0), fields.integer("layer")
    head = fields.integer("head")
    fields.finish()
    matrices = _view(trace, view).matrices(_layer(trace, view, layer), head)
    assert matrices.scores is not None
    return {
        "weights": array_data(matrices.weights[0]),
        "scores": array_data(matrices.scores[0]),
        "allowed": None if matrices.allowed is None else array_data(matrices.allowed),
    }


def _view(trace: Trace, number: int) -> Any:
    views = trace.attention_views()
    require(0 <= number < len(views), f"view {number} is out of range: there are {len(views)}, from 0")
    return views[number]


def _layer(trace: Trace, view: int, layer: int) -> int:
    """Return the layer after checking that the view has it; views without it raise ClearheadError."""
    trace.resolve_layer(layer, "encoder" if view == 2 and trace.config.is_encoder_decoder else None)
    return layer


# --- the logit lens


def _lens(inspector: Inspector, fields: Fields) -> Answer:
    trace, every, top = _read_trace(inspector, fields), fields.integer("every", 1), fields.integer("top", 5)
    positions = fields.integers("positions") or list(range(len(trace.tokens)))
    fields.finish()
    return lens_data(trace, inspector.texts, every, top, positions)


def _lens_tracks(inspector: Inspector, fields: Fields) -> Answer:
    trace, position, count = _read_trace(inspector, fields), fields.integer("position", -1), fields.integer("count", 8)
    fields.finish()
    return track_data(trace, inspector.texts, position, count)


# --- circuits


def _attribution(inspector: Inspector, fields: Fields) -> Answer:
    """Return a logit, or the difference to another one, as a sum over heads and feed-forward layers."""
    trace, token, position = _read_trace(inspector, fields), fields.integer("token"), fields.integer("position", -1)
    against = fields.optional_integer("against")
    fields.finish()
    attribution = attribute_logit(trace, token, position, against=against, by_head=True)
    return {
        "token": token,
        "position": attribution.position,
        "logit": number(attribution.logit),
        "contributions": [
            {"part": one.part, "layer": one.layer, "head": one.head, "logit": number(one.logit)}
            for one in attribution.contributions
        ],
    }


def _ablation(inspector: Inspector, fields: Fields) -> Answer:
    """Return the effect of switching some heads and branches off."""
    trace, token, position = _read_trace(inspector, fields), fields.integer("token"), fields.integer("position", -1)
    parts = []
    for part in fields.objects("parts"):
        parts.append((part.integer("layer"), part.text("part", "attention"), part.optional_integer("head")))
        part.finish()
    fields.finish()
    return effect_data(ablate_parts(trace, parts, position=position), token, inspector.texts)


def _patch_row(inspector: Inspector, fields: Fields) -> Answer:
    """Return how much `token` gains if the residual stream before one layer is replaced at each position in turn."""
    clean, token, layer = _read_trace(inspector, fields), fields.integer("token"), fields.integer("layer")
    corrupted = inspector.trace(fields.tokens("corrupted"), clean.source_tokens or [])
    position = fields.integer("position", -1)
    fields.finish()
    effects = [patch(clean, corrupted, layer, [at], position=position) for at in range(len(corrupted.tokens))]
    return {"layer": layer, "gains": [number(effect.gain(token)) for effect in effects]}


# --- cost and training runs


def _cost(inspector: Inspector, fields: Fields) -> Answer:
    num_prompt, num_new = fields.integer("num_prompt_tokens"), fields.integer("num_new_tokens", 0)
    fields.finish()
    return cost_data(inspector.model, num_prompt, num_new)


def _runs(inspector: Inspector, fields: Fields) -> Answer:
    fields.finish()
    return {"runs": None if inspector.runs is None else inspector.runs.summaries()}


def _run(inspector: Inspector, fields: Fields) -> Answer:
    name, after_step = fields.text("name"), fields.integer("after_step", -1)
    fields.finish()
    return {"rows": [], "sample": None} if inspector.runs is None else inspector.runs.metrics(name, after_step)


QUESTIONS: dict[str, Callable[[Inspector, Fields], Answer]] = {
    "model": _describe_model,
    "encode": _encode,
    "ids": _find_ids,
    "trace": _open_trace,
    "probabilities": _probabilities,
    "thumbnails": _thumbnails,
    "head": _head,
    "lens": _lens,
    "lens-tracks": _lens_tracks,
    "attribution": _attribution,
    "ablation": _ablation,
    "patch-row": _patch_row,
    "cost": _cost,
    "runs": _runs,
    "run": _run,
}
