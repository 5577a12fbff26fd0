"""Perplexity through windows, against transformers' own loss on the same windows and against arithmetic."""

import math

import pytest
import tokenizers
import torch
import transformers
from tokenizers import processors

from clearhead.api import Model
from clearhead.checkpoint.huggingface import save_folder
from clearhead.errors import ClearheadError
from clearhead.evaluation.perplexity import perplexity, windows
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.fast import FastTokenizer, SpecialTokens
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import toy, translator

TEXT = "A letter posted in the morning crosses the river by noon. Größe, 7 × 12 und naïve Käse; the ferry does not run."


@pytest.fixture(scope="module")
def model():
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)


@pytest.fixture(scope="module")
def theirs(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("perplexity") / "tiny"
    save_folder(model.network, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def fixed_length_recipe(network, ids, context, stride):
    """Summed loss and number of tokens, as transformers' documentation slides its window; labels it shifts itself."""
    nats, num_tokens, previous_end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        piece = torch.tensor([ids[begin:end]])
        labels = piece.clone()
        labels[:, : previous_end - begin if previous_end else 0] = -100
        counted = int((labels[:, 1:] != -100).sum())
        if counted:
            nats += network(piece, labels=labels).loss.item() * counted
            num_tokens += counted
        previous_end = end
        if end == len(ids):
            break
    return nats, num_tokens


@pytest.mark.parametrize(("context", "stride"), [(16, 8), (16, 1), (16, 16), (64, 32), (21, 13)])
@pytest.mark.parametrize("batch_tokens", [1, 100, 8192])
def test_equal_to_transformers(model, theirs, context, stride, batch_tokens):
    nats, num_tokens = fixed_length_recipe(theirs, model.encode(TEXT), context, stride)
    found = perplexity(model, TEXT, context, stride, batch_tokens)
    assert found["perplexity"] == pytest.approx(math.exp(nats / num_tokens), rel=1e-5)
    assert found.settings["tokens"] == num_tokens
    assert found.settings["bytes"] == num_tokens  # a token is a byte here
    assert found["bits_per_byte"] == pytest.approx(nats / num_tokens / math.log(2), rel=1e-5)


def test_one_window_is_the_score_of_the_text(model):
    assert perplexity(model, TEXT[:40])["perplexity"] == pytest.approx(model.score(TEXT[:40]).perplexity, rel=1e-5)


def test_a_token_for_the_beginning_takes_no_byte(tmp_path):
    special = SpecialTokens(bos="<s>")
    byte_tokenizer(special).save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    model = Model(tiny_network(vocab_size=257), FastTokenizer(library, special))
    assert model.encode("naïve")[0] == 256
    assert perplexity(model, "naïve").settings["bytes"] == perplexity(model, "naïve").settings["tokens"] == 6


@pytest.mark.parametrize(("num_tokens", "context", "stride"), [(10, 4, 2), (11, 4, 3), (9, 4, 1), (4, 4, 2), (7, 9, 4)])
def test_every_token_but_the_first_is_scored_once(num_tokens, context, stride):
    spans = list(windows(num_tokens, context, stride))
    assert [place for _, first, end in spans for place in range(first, end)] == list(range(1, num_tokens))
    assert all(end - begin <= context for begin, _, end in spans)
    assert all(first - begin >= context - stride for begin, first, _ in spans[1:])


def test_the_drawing_is_true():
    assert list(windows(10, 4, 2)) == [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]


def test_bad_settings(model):
    with pytest.raises(ClearheadError, match="stride is 9; it must be from 1 to the context, 8"):
        perplexity(model, TEXT, 8, 9)
    with pytest.raises(ClearheadError, match="stride is 0"):
        perplexity(model, TEXT, 8, 0)
    with pytest.raises(ClearheadError, match="context is 1"):
        perplexity(model, TEXT, 1)
    with pytest.raises(ClearheadError, match="a text of 1 tokens"):
        perplexity(model, "a")
    with pytest.raises(ClearheadError, match="only a decoder alone"):
        perplexity(Model(toy(translator())), TEXT)
    with pytest.raises(ClearheadError, match="no tokenizer"):
        perplexity(Model(tiny_network()), TEXT)
