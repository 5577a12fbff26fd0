"""The models inside the package do what they were trained for."""

import pytest

import clearhead
from clearhead.catalog import find_installed, get
from clearhead.catalog.bundled import BUNDLED_MODELS
from clearhead.checkpoint import read_config
from clearhead.data.synthetic import make_examples
from clearhead.errors import ClearheadError

MAX_BYTES = 4_000_000
# Pronunciations in CMUdict of words that were not in the training data.
PRONUNCIATIONS = {"bigfoot": "bɪɡfʊt", "blazed": "bleɪzd", "brace": "bɹeɪs", "brass": "bɹæs", "contention": "kʌntɛnʃʌn"}
PRONUNCIATIONS |= {"crackle": "kɹækʌl", "error": "ɛɹɝ", "nourishing": "nɝɪʃɪŋ"}


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_a_bundled_model_is_small_and_found_by_name(name):
    assert BUNDLED_MODELS[name].installed_bytes <= MAX_BYTES
    assert get(name) == find_installed(name.upper()) == BUNDLED_MODELS[name].folder
    assert read_config(name).is_encoder_decoder


@pytest.mark.parametrize(("min_length", "max_length"), [(1, 48), (48, 48)])
def test_capitals_converts_unseen_sentences(min_length, max_length):
    pairs = list(make_examples("capitals", min_length, max_length, num_examples=150, seed=1, held_out=True))
    model = clearhead.load("capitals", fast=False)
    generations = model.generate_many([source for source, _ in pairs], max_new_tokens=64)
    assert [generation.text for generation in generations] == [target for _, target in pairs]


def test_g2p_gives_pronunciations():
    generations = clearhead.load("g2p", fast=False).generate_many(list(PRONUNCIATIONS), max_new_tokens=48)
    assert [generation.text for generation in generations] == list(PRONUNCIATIONS.values())


def test_the_error_suggests_the_name_of_a_bundled_model():
    with pytest.raises(ClearheadError, match="did you mean 'capitals'"):
        clearhead.load("capitls")
