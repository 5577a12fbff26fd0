"""Questions read from files as the package has them, and their measures from plain forward passes."""

import gzip
import json
import math

import pytest
import torch

from clearhead.api import Model
from clearhead.catalog import store
from clearhead.cli.evaluate import DATASET, QUESTIONS
from clearhead.errors import ClearheadError
from clearhead.evaluation.choices import TASKS, Question, ask, read_questions, score
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


def row(number, label, context, continuation, query=None):
    request = {"context": context, "continuation": continuation}
    return {"doc_id": number, "label": label, "doc": {"query": query or context}, "request": request}


def write(folder, name, rows):
    lines = "".join(json.dumps(one) + "\n" for one in rows)
    (folder / TASKS[name].file).write_bytes(gzip.compress(lines.encode()))


def multiple_choice(num_questions=12, before=""):
    for number in range(num_questions):
        for choice in CHOICES:
            query = QUESTION.format(number)
            yield row(number, number % 4, before + query, choice, query)
            yield row(1_000_000 + number, number % 4, "Answer:", choice)


def logprob(model, context, continuation):
    """Straight from one forward pass."""
    ids, start = model.encode(context + continuation), len(model.encode(context))
    with torch.no_grad():
        foretold = model.network(torch.tensor([ids]))[0].log_softmax(-1)
    tokens = range(start, len(ids))
    is_greedy = all(int(foretold[place - 1].argmax()) == ids[place] for place in tokens)
    return sum(foretold[place - 1, ids[place]].item() for place in tokens), is_greedy


def best(scores):
    return max(range(len(scores)), key=scores.__getitem__)


@pytest.mark.parametrize("name", ["arc-easy", "hellaswag", "piqa"])
def test_multiple_choice(model, name, tmp_path):
    """Rows without a prompt are left out."""
    rows = sorted(multiple_choice(before="Solved. " * 5 if name == "arc-easy" else ""), key=lambda one: one["doc_id"])
    write(tmp_path, name, rows)
    plain, normalised = 0, 0
    for number in range(12):
        scores = [logprob(model, QUESTION.format(number), choice)[0] for choice in CHOICES]
        plain += best(scores) == number % 4
        normalised += best([one / (len(choice) - 1) for one, choice in zip(scores, CHOICES, strict=True)]) == number % 4
    found = ask(model, name, tmp_path)
    assert found.num_examples == 12
    assert found["accuracy"] == pytest.approx(plain / 12)
    assert found["accuracy_normalised"] == pytest.approx(normalised / 12)


def test_the_two_accuracies_differ(model, tmp_path):
    """The longest choice is the least likely in sum and wins by character: the wrong divisor would be seen."""
    scores = [logprob(model, QUESTION.format(0), choice)[0] for choice in CHOICES]
    by_character = [one / (len(choice) - 1) for one, choice in zip(scores, CHOICES, strict=True)]
    assert best(scores) != best(by_character)
    write(tmp_path, "piqa", [row(0, best(by_character), QUESTION.format(0), choice) for choice in CHOICES])
    found = ask(model, "piqa", tmp_path)
    assert (found["accuracy"], found["accuracy_normalised"]) == (0, 1)


def test_contexts_that_differ(model, tmp_path):
    """WinoGrande: the same ending after either name."""
    pairs = [(f"The trophy is bigger than the bag, so {name}", " does not fit.") for name in ("it", "the bag", "he")]
    scores = [logprob(model, *pair)[0] for pair in pairs]
    write(tmp_path, "winogrande", [row(0, best(scores), *pair) for pair in pairs])
    found = ask(model, "winogrande", tmp_path)
    assert [one.name for one in found.measures] == ["accuracy"]
    assert found["accuracy"] == 1


def test_last_words(model, tmp_path):
    """LAMBADA: one ending is what the model itself would write."""
    written = model.generate("The sea is", max_new_tokens=3).text
    pairs = [("The sea is", written), ("The sea is", " wide"), ("A cat sat on a", " mat")]
    write(tmp_path, "lambada", [row(number, [pair[1]], *pair) for number, pair in enumerate(pairs)])
    expected = [logprob(model, *pair) for pair in pairs]
    found = ask(model, "lambada", tmp_path)
    assert found["accuracy"] == pytest.approx(sum(is_greedy for _, is_greedy in expected) / 3)
    assert found["accuracy"] > 0
    assert found["perplexity"] == pytest.approx(math.exp(-sum(one for one, _ in expected) / 3), rel=1e-4)


def test_the_first_questions(model, tmp_path):
    write(tmp_path, "hellaswag", sorted(multiple_choice(), key=lambda one: one["doc_id"]))
    assert ask(model, "hellaswag", tmp_path, limit=5).num_examples == 5
    with pytest.raises(ClearheadError, match="limit is 0"):
        ask(model, "hellaswag", tmp_path, limit=0)


def test_solved_examples_are_left_out_where_they_stand(tmp_path):
    rows = [row(0, 0, "Solved. " + QUESTION, choice, QUESTION) for choice in CHOICES]
    write(tmp_path, "arc-easy", rows)
    (asked,) = read_questions(tmp_path / TASKS["arc-easy"].file, has_examples=True)
    (whole,) = read_questions(tmp_path / TASKS["arc-easy"].file)
    assert asked.contexts == (QUESTION,) * 4
    assert whole.contexts == ("Solved. " + QUESTION,) * 4
    assert asked.choices == whole.choices == tuple(CHOICES)


def test_a_prompt_longer_than_the_context_is_cut(model):
    long = "word " * 60 + "The sea is"
    ((found, _),) = score(model, [Question((long, long), (" wide", " a long blue one"), 0)])
    context = long.encode()[-(128 + 1 - len(" wide")) :].decode()
    assert found.logprob == pytest.approx(logprob(model, context, " wide")[0], abs=1e-4)
    assert found.logprob != pytest.approx(logprob(model, long, " wide")[0], abs=1e-3)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (b"", "holds no question"),
        (b"{}\n", "line 1 of .* is not a request"),
        (b"[1]\n", "line 1 of .* is not a JSON object"),
        (json.dumps(row(0, 7, "a", " b")).encode(), "question 0 has no choice 7"),
        (json.dumps(row("0", 7, "a", " b")).encode(), "is not a request"),
    ],
)
def test_a_broken_file(model, tmp_path, lines, said):
    (tmp_path / "piqa.jsonl.gz").write_bytes(gzip.compress(lines))
    with pytest.raises(ClearheadError, match=said):
        ask(model, "piqa", tmp_path)


def test_what_cannot_be_asked(model, tmp_path):
    with pytest.raises(ClearheadError, match="did you mean 'hellaswag'"):
        ask(model, "hellaswg", tmp_path)
    with pytest.raises(ClearheadError, match="cannot be read"):
        ask(model, "piqa", tmp_path)
    with pytest.raises(ClearheadError, match="only a decoder alone"):
        ask(Model(toy(translator())), "piqa", tmp_path)


def test_the_command_names_every_task():
    assert sorted(QUESTIONS) == sorted(TASKS)


@pytest.mark.download
@pytest.mark.parametrize("name", TASKS)
def test_the_released_questions(name):
    try:
        folder = store.get(DATASET)
    except store.DownloadError as error:
        pytest.skip(str(error))
    questions = list(read_questions(folder / TASKS[name].file, TASKS[name].has_examples))
    assert len(questions) == SIZES[name]
    assert all(choice.startswith(" ") for question in questions for choice in question.choices)
    assert all(context for question in questions for context in question.contexts)
    assert len({len(question.contexts) - len(question.choices) for question in questions}) == 1
    if TASKS[name].has_examples:
        assert all(context.count("Question:") == 1 for question in questions for context in question.contexts)
