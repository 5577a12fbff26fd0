"""Texts to labels: classify texts, pairs of texts and tokens, and rank documents by a query.

classify_texts(model, model.config, ["I liked it."])[0].label; rerank_texts(model, model.config, "a query", documents)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from clearhead.architecture import Classifier, LearnedPositions, ModelConfig, Stack, check_tokens
from clearhead.checkpoint import Labels, ModelParts
from clearhead.errors import ClearheadError
from clearhead.generation import Prompt, encode_prompt, explain_out_of_memory, pad_right, require_tokenizer
from clearhead.tokenization import EncodedText, encode_pair

Pair = tuple[str, str]


@dataclass(frozen=True)
class Classification:
    """The labels of one text."""

    label: str  # the one with the highest score
    score: float
    scores: dict[str, float]  # by label: probabilities, unless the model predicts a number


@dataclass(frozen=True)
class TokenLabel:
    """The label of one token."""

    token: str
    label: str
    score: float


@dataclass(frozen=True)
class Ranked:
    """A document and its score for a query."""

    index: int  # among the given documents
    score: float
    document: str


def classify_texts(
    model: ModelParts, config: ModelConfig, texts: str | Pair | Sequence[Prompt | Pair], *, truncate: bool = False
) -> list[Classification] | list[list[TokenLabel]]:
    """Return the labels of each text, or of each of its tokens."""
    classifier, labels = _require_classifier(model, config)
    if not isinstance(texts, Iterable):
        raise ClearheadError(f"the texts are {texts!r}; give one text or a list of them")
    texts = texts if isinstance(texts, str | tuple) else list(texts)
    is_single = isinstance(texts, str) or _is_pair(texts) or _is_ids(texts)
    inputs = [cast(Prompt | Pair, texts)] if is_single else list(cast(Sequence[Prompt | Pair], texts))
    if not inputs:
        raise ClearheadError("there is no text to classify; give at least one")
    encoded = [_encode(model, each, truncate) for each in inputs]
    probabilities = _activate(_scores(model, encoded), labels.activation)
    if classifier.reads == "tokens":
        return [_label_tokens(model, *each, labels) for each in zip(encoded, probabilities, strict=True)]
    return [_label_text(row.tolist(), labels) for row in probabilities]


def rerank_texts(model: ModelParts, config: ModelConfig, query: str, documents: Sequence[str]) -> list[Ranked]:
    """Return the documents with their scores, the best first."""
    classifier, labels = _require_classifier(model, config)
    if classifier.num_labels != 1 or classifier.reads == "tokens":
        raise ClearheadError(
            f"ranking needs a model that gives a pair of texts one score, but this one has {classifier.num_labels} "
            f"{'labels for each token' if classifier.reads == 'tokens' else 'labels'}; use classify instead"
        )
    if isinstance(documents, str) or not isinstance(documents, Iterable):
        raise ClearheadError(f"the documents are {documents!r}; give a list of texts")
    documents = list(documents)
    if not documents:
        return []
    encoded = [_encode(model, (query, document), truncate=True) for document in documents]
    scores = _activate(_scores(model, encoded), labels.activation)[:, 0].tolist()
    ranked = [Ranked(index, score, documents[index]) for index, score in enumerate(scores)]
    return sorted(ranked, key=lambda each: each.score, reverse=True)


def _require_classifier(model: ModelParts, config: ModelConfig) -> tuple[Classifier, Labels]:
    classifier = config.classifier
    if classifier is None:
        raise ClearheadError("this model has no classification head; load one that was fine-tuned to classify")
    names = tuple(f"LABEL_{number}" for number in range(classifier.num_labels))
    return classifier, model.labels or Labels(names=names, activation="softmax" if len(names) > 1 else "sigmoid")


def _is_ids(text: Sequence[object]) -> bool:
    return len(text) > 0 and all(isinstance(part, int) for part in text)


def _is_pair(text: object) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)


def _encode(model: ModelParts, text: Prompt | Pair, truncate: bool) -> EncodedText:
    """Return the tokens of a text, a pair of texts or a list of token ids."""
    stack = model.network.config.output_stack
    if not isinstance(text, str) and not _is_pair(text):
        ids = encode_prompt(text, model.tokenizer)  # type: ignore[arg-type]
        encoded = EncodedText(ids, [0] * len(ids))
    else:
        first, second = (text, None) if isinstance(text, str) else text
        limit = _max_tokens(model, stack) if truncate else None
        encoded = encode_pair(require_tokenizer(model.tokenizer), str(first), second, limit)  # type: ignore[arg-type]
    check_tokens(encoded.ids, stack)
    return encoded


def _max_tokens(model: ModelParts, stack: Stack) -> int:
    positions = stack.token_embedding.positions
    return positions.num_positions if isinstance(positions, LearnedPositions) else model.network.config.context


@torch.no_grad()
def _scores(model: ModelParts, encoded: Sequence[EncodedText]) -> Tensor:
    """Return the scores of labels (B, C), or of tokens (B, T, C)."""
    network = model.network
    tokens, mask = pad_right([each.ids for each in encoded], network.device)
    token_types = None
    if network.config.output_stack.token_embedding.num_token_types > 1:
        token_types, _ = pad_right([each.token_types for each in encoded], network.device)
    with explain_out_of_memory():
        return network.classify(network.hidden_states(tokens, mask, token_types=token_types), mask)


def _activate(scores: Tensor, activation: str) -> Tensor:
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    match activation:
        case "softmax":
            return scores.softmax(dim=-1)
        case "sigmoid":
            return scores.sigmoid()
        case _:
            return scores


def _label_text(scores: list[float], labels: Labels) -> Classification:
    best = max(range(len(scores)), key=scores.__getitem__)
    return Classification(labels.names[best], scores[best], dict(zip(labels.names, scores, strict=True)))


def _label_tokens(model: ModelParts, encoded: EncodedText, scores: Tensor, labels: Labels) -> list[TokenLabel]:
    """Return the label of each token that is not a special one."""
    tokenizer = model.tokenizer
    special = frozenset[int]() if tokenizer is None else tokenizer.special_ids
    labeled = []
    for token, row in zip(encoded.ids, scores.tolist(), strict=False):  # scores has rows for padding at its end
        best = max(range(len(row)), key=row.__getitem__)
        text = str(token) if tokenizer is None else tokenizer.token_text(token)
        if token not in special:
            labeled.append(TokenLabel(text, labels.names[best], row[best]))
    return labeled
