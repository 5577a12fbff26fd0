"""Tasks without files: right answers, the lengths asked for, validation never seen in training."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.counter_random import numbers
from clearhead.data.synthetic import TASKS, examples, make
from clearhead.errors import ClearheadError

KEYS = st.integers(0, 2**64 - 1).map(np.uint64)


def induced(question):
    """The character after the last earlier place of the last one."""
    place = question.rindex(question[-1], 0, len(question) - 1)
    return question[place + 1]


def capitalised(question):
    order, sentence = question.split(" ", 1)
    return {"<U>": sentence.upper, "<L>": sentence.lower}[order]()


ANSWERS = {
    "copy": str,
    "reverse": lambda question: "".join(reversed(question)),
    "sort": lambda question: "".join(sorted(question)),
    "addition": lambda question: str(sum(map(int, question.split("+")))),
    "induction": induced,
    "capitals": capitalised,
}


def test_every_task_is_checked_here():
    assert set(ANSWERS) == set(TASKS)


@pytest.mark.parametrize("task", TASKS)
@settings(deadline=None)
@given(key=KEYS, low=st.integers(1, 10), more=st.integers(0, 10))
def test_answers_are_right_and_lengths_as_asked(task, key, low, more):
    question, answer = make(task, key, low, low + more)
    assert answer == ANSWERS[task](question)
    if task in ("copy", "reverse", "sort"):
        assert low <= len(question) <= low + more
    elif task == "addition":
        assert max(map(len, question.split("+"))) <= low + more
    else:
        assert len(question) <= max(low + more, 2) + 4  # the repeated character, or the order before the sentence
    assert (question, answer) == make(task, key, low, low + more)


def test_the_books_example_is_of_the_kind_that_is_made():
    """Book D4: `<U> I am a student` asks for `I AM A STUDENT`."""
    assert capitalised("<U> I am a student") == "I AM A STUDENT"
    made = [make("capitals", numbers(0, number), 12, 12)[0] for number in range(200)]
    assert all(re.fullmatch(r"<[UL]> \S+( \S+)*", question) for question in made)
    assert {question[:3] for question in made} == {"<U>", "<L>"}
    assert sum(" " in question[4:] for question in made) > 100


@pytest.mark.parametrize("lengths", [(1, 1), (2, 5)])
@pytest.mark.parametrize("task", TASKS)
def test_validation_is_never_seen_in_training(task, lengths):
    """Nor does the smallest task run out of questions for either side."""
    train = {question for question, _ in examples(task, *lengths, num_examples=200, seed=0, held_out=False)}
    validation = {question for question, _ in examples(task, *lengths, num_examples=200, seed=0, held_out=True)}
    assert train
    assert validation
    assert not train & validation


def test_examples_are_those_of_their_seed():
    first, again, other = (
        list(examples("copy", 1, 8, num_examples=50, seed=seed, held_out=False)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) > 40


def test_an_unknown_task():
    with pytest.raises(ClearheadError, match="unknown task 'coppy'; did you mean 'copy'"):
        make("coppy", np.uint64(0), 1, 2)
