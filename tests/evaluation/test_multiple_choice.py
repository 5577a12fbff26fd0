"""Test multiple-choice tasks: questions read from files, and metrics against plain forward passes."""

import gzip
import json
import math

import pytest
import torch

from clearhead.api import Model
from clearhead.catalog import DownloadError, get
from clearhead.cli.evaluate import DATASET, MULTIPLE_CHOICE
from clearhead.errors import ClearheadError
from clearhead.evaluation import evaluate_multiple_choice
from clearhead.evaluation.multiple_choice import TASKS, Question, choice_likelihoods, read_questions
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import toy, translator

QUESTION = "Question: Which is {}?\nAnswer:"
CHOICES = [" red", " a long blue one", " green or so", " X"]
SIZES = {"arc-challenge": 1172, "arc-easy": 2376, "hellaswag": 10042, "lambada": 5153, "piqa": 1838, "winogrande": 1267}


@pytest.fixture(scope="module")
def model():
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size, context=128), tokenizer)


def entry(number, label, context, continuation, query=None):
    request = {"context": context, "continuation": continuation}
    return {"doc_id": number, "label": label, "doc": {"query": query or context}, "request": request}


def write_task(folder, name, entries):
    lines = "".join(json.dumps(one) + "\n" for one in entries)
    (folder / TASKS[name].file).write_bytes(gzip.compress(lines.encode()))


def make_entries(num_questions=12, before=""):
    for number in range(num_questions):
        for choice in CHOICES:
            query = QUESTION.format(number)
            yield entry(number, number % 4, before + query, choice, query)
            yield entry(1_000_000 + number, number % 4, "Answer:", choice)


def logprob(model, context, continuation):
    """Return log p of the continuation and whether it is greedy, from one forward pass."""
    ids, start = model.encode(context + continuation), len(model.encode(context))
    with torch.no_grad():
        logprobs = model.network(torch.tensor([ids]))[0].log_softmax(-1)
    tokens = range(start, len(ids))
    is_greedy = all(int(logprobs[position - 1].argmax()) == ids[position] for position in tokens)
    return sum(logprobs[position - 1, ids[position]].item() for position in tokens), is_greedy


def best(scores):
    return max(range(len(scores)), key=scores.__getitem__)


@pytest.mark.parametrize("name", ["arc-easy", "hellaswag", "piqa"])
def test_accuracy_equals_that_of_plain_forward_passes(model, name, tmp_path):
    """Entries without a prompt are skipped."""
    entries = sorted(make_entries(before="Solved. " * 5 if name == "arc-easy" else ""), key=lambda one: one["doc_id"])
    write_task(tmp_path, name, entries)
    num_correct, num_correct_normalized = 0, 0
    for number in range(12):
        scores = [logprob(model, QUESTION.format(number), choice)[0] for choice in CHOICES]
        num_correct += best(scores) == number % 4
        by_character = [one / (len(choice) - 1) for one, choice in zip(scores, CHOICES, strict=True)]
        num_correct_normalized += best(by_character) == number % 4
    result = evaluate_multiple_choice(model, name, tmp_path)
    assert result.num_examples == 12
    assert result["accuracy"] == pytest.approx(num_correct / 12)
    assert result["accuracy_normalized"] == pytest.approx(num_correct_normalized / 12)


def test_accuracy_and_normalized_accuracy_can_differ(model, tmp_path):
    """The longest choice is the least likely in sum and wins per character, so a wrong divisor would show."""
    scores = [logprob(model, QUESTION.format(0), choice)[0] for choice in CHOICES]
    by_character = [one / (len(choice) - 1) for one, choice in zip(scores, CHOICES, strict=True)]
    assert best(scores) != best(by_character)
    write_task(tmp_path, "piqa", [entry(0, best(by_character), QUESTION.format(0), choice) for choice in CHOICES])
    result = evaluate_multiple_choice(model, "piqa", tmp_path)
    assert (result["accuracy"], result["accuracy_normalized"]) == (0, 1)


def test_contexts_can_differ_between_choices(model, tmp_path):
    """WinoGrande has the same ending after different names."""
    pairs = [(f"The trophy is bigger than the bag, so {name}", " does not fit.") for name in ("it", "the bag", "he")]
    scores = [logprob(model, *pair)[0] for pair in pairs]
    write_task(tmp_path, "winogrande", [entry(0, best(scores), *pair) for pair in pairs])
    result = evaluate_multiple_choice(model, "winogrande", tmp_path)
    assert [metric.name for metric in result.metrics] == ["accuracy"]
    assert result["accuracy"] == 1


def test_lambada_reports_accuracy_and_perplexity_of_the_last_word(model, tmp_path):
    """One of the endings is what greedy decoding generates."""
    generated = model.generate("The sea is", max_new_tokens=3).text
    pairs = [("The sea is", generated), ("The sea is", " wide"), ("A cat sat on a", " mat")]
    write_task(tmp_path, "lambada", [entry(number, [pair[1]], *pair) for number, pair in enumerate(pairs)])
    expected = [logprob(model, *pair) for pair in pairs]
    result = evaluate_multiple_choice(model, "lambada", tmp_path)
    assert result["accuracy"] == pytest.approx(sum(is_greedy for _, is_greedy in expected) / 3)
    assert result["accuracy"] > 0
    assert result["perplexity"] == pytest.approx(math.exp(-sum(one for one, _ in expected) / 3), rel=1e-4)


def test_limit_takes_the_first_questions(model, tmp_path):
    write_task(tmp_path, "hellaswag", sorted(make_entries(), key=lambda one: one["doc_id"]))
    assert evaluate_multiple_choice(model, "hellaswag", tmp_path, limit=5).num_examples == 5
    with pytest.raises(ClearheadError, match="limit is 0"):
        evaluate_multiple_choice(model, "hellaswag", tmp_path, limit=0)


def test_few_shot_examples_are_left_out(tmp_path):
    entries = [entry(0, 0, "Solved. " + QUESTION, choice, QUESTION) for choice in CHOICES]
    write_task(tmp_path, "arc-easy", entries)
    (zero_shot,) = read_questions(tmp_path / TASKS["arc-easy"].file, few_shot=True)
    (full,) = read_questions(tmp_path / TASKS["arc-easy"].file)
    assert zero_shot.contexts == (QUESTION,) * 4
    assert full.contexts == ("Solved. " + QUESTION,) * 4
    assert zero_shot.choices == full.choices == tuple(CHOICES)


def test_a_prompt_longer_than_the_context_is_truncated(model):
    long = "word " * 60 + "The sea is"
    ((likelihood, _),) = choice_likelihoods(model, [Question((long, long), (" wide", " a long blue one"), 0)])
    context = long.encode()[-(128 + 1 - len(" wide")) :].decode()
    assert likelihood.logprob == pytest.approx(logprob(model, context, " wide")[0], abs=1e-4)
    assert likelihood.logprob != pytest.approx(logprob(model, long, " wide")[0], abs=1e-3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "contains no question"),
        (b"{}\n", "line 1 of .* is not a request"),
        (b"[1]\n", "line 1 of .* is not a JSON object"),
        (json.dumps(entry(0, 7, "a", " b")).encode(), "question 0 has no choice 7"),
        (json.dumps(entry("0", 7, "a", " b")).encode(), "is not a request"),
    ],
)
def test_a_broken_file_raises(model, tmp_path, lines, message):
    (tmp_path / "piqa.jsonl.gz").write_bytes(gzip.compress(lines))
    with pytest.raises(ClearheadError, match=message):
        evaluate_multiple_choice(model, "piqa", tmp_path)


def test_unknown_tasks_missing_files_and_encoders_raise(model, tmp_path):
    with pytest.raises(ClearheadError, match="did you mean 'hellaswag'"):
        evaluate_multiple_choice(model, "hellaswg", tmp_path)
    with pytest.raises(ClearheadError, match="cannot be read"):
        evaluate_multiple_choice(model, "piqa", tmp_path)
    with pytest.raises(ClearheadError, match="needs a decoder-only model"):
        evaluate_multiple_choice(Model(toy(translator())), "piqa", tmp_path)


def test_the_command_lists_every_task():
    assert sorted(MULTIPLE_CHOICE) == sorted(TASKS)


@pytest.mark.download
@pytest.mark.parametrize("name", TASKS)
def test_the_released_questions_can_be_read(name):
    try:
        folder = get(DATASET)
    except DownloadError as error:
        pytest.skip(str(error))
    questions = list(read_questions(folder / TASKS[name].file, TASKS[name].few_shot))
    assert len(questions) == SIZES[name]
    assert all(choice.startswith(" ") for question in questions for choice in question.choices)
    assert all(context for question in questions for context in question.contexts)
    assert len({len(question.contexts) - len(question.choices) for question in questions}) == 1
    if TASKS[name].few_shot:
        assert all(context.count("Question:") == 1 for question in questions for context in question.contexts)
