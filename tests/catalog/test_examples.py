"""The models inside the package do what they were trained for."""

import pytest

import clearhead
from clearhead.catalog import store
from clearhead.catalog.examples import EXAMPLES
from clearhead.checkpoint.load import read_config
from clearhead.data.synthetic import examples
from clearhead.errors import ClearheadError

MAX_BYTES = 4_000_000
# As CMUdict has them; none of these words was trained on.
SOUNDS = {"bigfoot": "bɪɡfʊt", "blazed": "bleɪzd", "brace": "bɹeɪs", "brass": "bɹæs", "contention": "kʌntɛnʃʌn"}
SOUNDS |= {"crackle": "kɹækʌl", "error": "ɛɹɝ", "nourishing": "nɝɪʃɪŋ"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_small_whole_and_found_by_name(name):
    assert EXAMPLES[name].num_bytes <= MAX_BYTES
    assert store.get(name) == store.find(name.upper()) == EXAMPLES[name].folder
    assert read_config(name).is_encoder_decoder


@pytest.mark.parametrize(("min_length", "max_length"), [(1, 48), (48, 48)])
def test_capitals_of_unseen_sentences(min_length, max_length):
    asked = list(examples("capitals", min_length, max_length, num_examples=150, seed=1, held_out=True))
    model = clearhead.load("capitals", fast=False)
    made = model.generate_many([source for source, _ in asked], max_new_tokens=64)
    assert [generation.text for generation in made] == [target for _, target in asked]


def test_sounds_of_words():
    made = clearhead.load("g2p", fast=False).generate_many(list(SOUNDS), max_new_tokens=48)
    assert [generation.text for generation in made] == list(SOUNDS.values())


def test_a_misspelt_example_is_named():
    with pytest.raises(ClearheadError, match="did you mean 'capitals'"):
        clearhead.load("capitls")
