"""Test the synthetic tasks: correct targets, requested lengths, and validation sources that never occur in training."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.counter_random import random_integers
from clearhead.data.synthetic import TASKS, make_example, make_examples
from clearhead.errors import ClearheadError

KEYS = st.integers(0, 2**64 - 1).map(np.uint64)


def solve_induction(source):
    """Return the character after the previous occurrence of the last character."""
    previous = source.rindex(source[-1], 0, len(source) - 1)
    return source[previous + 1]


def solve_capitals(source):
    instruction, sentence = source.split(" ", 1)
    return {"<U>": sentence.upper, "<L>": sentence.lower}[instruction]()


SOLUTIONS = {
    "copy": str,
    "reverse": lambda source: "".join(reversed(source)),
    "sort": lambda source: "".join(sorted(source)),
    "addition": lambda source: str(sum(map(int, source.split("+")))),
    "induction": solve_induction,
    "capitals": solve_capitals,
}


def test_every_task_has_a_solution_in_this_file():
    assert set(SOLUTIONS) == set(TASKS)


@pytest.mark.parametrize("task", TASKS)
@settings(deadline=None)
@given(key=KEYS, low=st.integers(1, 10), more=st.integers(0, 10))
def test_targets_are_correct_and_lengths_within_the_limits(task, key, low, more):
    source, target = make_example(task, key, low, low + more)
    assert target == SOLUTIONS[task](source)
    if task in ("copy", "reverse", "sort"):
        assert low <= len(source) <= low + more
    elif task == "addition":
        assert max(map(len, source.split("+"))) <= low + more
    else:
        assert len(source) <= max(low + more, 2) + 4  # the repeated character, or the instruction before the sentence
    assert (source, target) == make_example(task, key, low, low + more)


def test_capitals_sources_have_the_form_of_the_book():
    """Book D4: `<U> I am a student` becomes `I AM A STUDENT`."""
    assert solve_capitals("<U> I am a student") == "I AM A STUDENT"
    sources = [make_example("capitals", random_integers(0, number), 12, 12)[0] for number in range(200)]
    assert all(re.fullmatch(r"<[UL]> \S+( \S+)*", source) for source in sources)
    assert {source[:3] for source in sources} == {"<U>", "<L>"}
    assert sum(" " in source[4:] for source in sources) > 100


@pytest.mark.parametrize("lengths", [(1, 1), (2, 5)])
@pytest.mark.parametrize("task", TASKS)
def test_validation_sources_never_occur_in_training(task, lengths):
    """The smallest tasks also have sources for both sides."""
    train = {source for source, _ in make_examples(task, *lengths, num_examples=200, seed=0, held_out=False)}
    validation = {source for source, _ in make_examples(task, *lengths, num_examples=200, seed=0, held_out=True)}
    assert train
    assert validation
    assert not train & validation


def test_make_examples_is_deterministic_for_a_seed():
    first, again, other = (
        list(make_examples("copy", 1, 8, num_examples=50, seed=seed, held_out=False)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) > 40


def test_an_unknown_task_is_rejected_with_a_suggestion():
    with pytest.raises(ClearheadError, match="unknown task 'coppy'; did you mean 'copy'"):
        make_example("coppy", np.uint64(0), 1, 2)
