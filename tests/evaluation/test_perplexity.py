"""Test windowed perplexity against transformers' loss on the same windows."""

import math

import pytest
import tokenizers
import torch
import transformers
from tokenizers import processors

from clearhead.api import Model
from clearhead.checkpoint.huggingface import save_folder
from clearhead.errors import ClearheadError
from clearhead.evaluation.perplexity import evaluate_perplexity, make_windows
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import toy, translator

TEXT = "A letter posted in the morning crosses the river by noon. Größe, 7 × 12 und naïve Käse; the ferry does not run."


@pytest.fixture(scope="module")
def model():
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)


@pytest.fixture(scope="module")
def transformers_network(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("perplexity") / "tiny"
    save_folder(model.network, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def fixed_length_recipe(network, ids, context, stride):
    """Return the summed loss and the number of tokens, with the sliding window of transformers' documentation.

    transformers shifts the labels itself.
    """
    nats, num_tokens, previous_end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = torch.tensor([ids[begin:end]])
        labels = window.clone()
        labels[:, : previous_end - begin if previous_end else 0] = -100
        num_scored = int((labels[:, 1:] != -100).sum())
        if num_scored:
            nats += network(window, labels=labels).loss.item() * num_scored
            num_tokens += num_scored
        previous_end = end
        if end == len(ids):
            break
    return nats, num_tokens


@pytest.mark.parametrize(("context", "stride"), [(16, 8), (16, 1), (16, 16), (64, 32), (21, 13)])
@pytest.mark.parametrize("batch_tokens", [1, 100, 8192])
def test_perplexity_equals_that_of_transformers(model, transformers_network, context, stride, batch_tokens):
    nats, num_tokens = fixed_length_recipe(transformers_network, model.encode(TEXT), context, stride)
    result = evaluate_perplexity(model, TEXT, context, stride, batch_tokens)
    assert result["perplexity"] == pytest.approx(math.exp(nats / num_tokens), rel=1e-5)
    assert result.settings["tokens"] == num_tokens
    assert result.settings["bytes"] == num_tokens  # a token is a byte here
    assert result["bits_per_byte"] == pytest.approx(nats / num_tokens / math.log(2), rel=1e-5)


def test_perplexity_in_one_window_equals_the_score_of_the_text(model):
    assert evaluate_perplexity(model, TEXT[:40])["perplexity"] == pytest.approx(
        model.score(TEXT[:40]).perplexity, rel=1e-5
    )


def test_a_beginning_of_text_token_counts_no_byte(tmp_path):
    special = SpecialTokens(bos="<s>")
    byte_tokenizer(special).save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    model = Model(tiny_network(vocab_size=257), LibraryTokenizer(library, special))
    assert model.encode("naïve")[0] == 256
    assert (
        evaluate_perplexity(model, "naïve").settings["bytes"]
        == evaluate_perplexity(model, "naïve").settings["tokens"]
        == 6
    )


@pytest.mark.parametrize(("num_tokens", "context", "stride"), [(10, 4, 2), (11, 4, 3), (9, 4, 1), (4, 4, 2), (7, 9, 4)])
def test_every_token_but_the_first_is_scored_once(num_tokens, context, stride):
    windows = list(make_windows(num_tokens, context, stride))
    assert [position for _, first, end in windows for position in range(first, end)] == list(range(1, num_tokens))
    assert all(end - begin <= context for begin, _, end in windows)
    assert all(first - begin >= context - stride for begin, first, _ in windows[1:])


def test_windows_of_the_module_docstring():
    assert list(make_windows(10, 4, 2)) == [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]


def test_wrong_settings_raise(model):
    with pytest.raises(ClearheadError, match="stride is 9; it must be from 1 to the context, 8"):
        evaluate_perplexity(model, TEXT, 8, 9)
    with pytest.raises(ClearheadError, match="stride is 0"):
        evaluate_perplexity(model, TEXT, 8, 0)
    with pytest.raises(ClearheadError, match="context is 1"):
        evaluate_perplexity(model, TEXT, 1)
    with pytest.raises(ClearheadError, match="the number of tokens in the text is 1"):
        evaluate_perplexity(model, "a")
    with pytest.raises(ClearheadError, match="needs a decoder-only model"):
        evaluate_perplexity(Model(toy(translator())), TEXT)
    with pytest.raises(ClearheadError, match="no tokenizer"):
        evaluate_perplexity(Model(tiny_network()), TEXT)
