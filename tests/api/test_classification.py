"""Model.classify and Model.rerank compared with transformers, and heads of decoders: labels, pairs, tokens, no head."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead
from clearhead.errors import ClearheadError
from clearhead.tokenization import byte_tokenizer
from tests.api.sentence_folders import write_bert

NAMES = {0: "sad", 1: "glad", 2: "mixed"}
PAIRS = [("the cat sat", "a cat sat on the mat"), ("the dog ran", "fox")]
LLAMA = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
LLAMA |= {"intermediate_size": 48, "max_position_embeddings": 24, "initializer_range": 0.4, "bos_token_id": 2}
LLAMA |= {"eos_token_id": 3, "tie_word_embeddings": False}


def settings(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def expected_scores(model, ours, texts):
    """Return the logits that transformers computes for one text or pair at a time."""
    rows = []
    for text in texts:
        first, second = (text, None) if isinstance(text, str) else text
        encoding = ours.tokenizer._library.encode(first, second)
        inputs = {"input_ids": torch.tensor([encoding.ids]), "token_type_ids": torch.tensor([encoding.type_ids])}
        rows.append(model(**inputs).logits[0])
    return rows


def test_texts_and_pairs(tmp_path):
    model = write_bert(tmp_path, transformers.BertForSequenceClassification, id2label=NAMES)
    ours = clearhead.load(tmp_path)
    texts = ["the cat sat", *PAIRS]
    results = ours.classify(texts)
    for result, row in zip(results, expected_scores(model, ours, texts), strict=True):
        probabilities = row.softmax(dim=-1)
        assert list(result.scores) == list(NAMES.values())
        assert list(result.scores.values()) == pytest.approx(probabilities.tolist(), abs=1e-5)
        assert result.label == NAMES[int(probabilities.argmax())]
        assert result.score == max(result.scores.values())
    swapped = ours.classify((PAIRS[0][1], PAIRS[0][0]))[0]
    assert swapped.scores != results[1].scores
    assert ours.classify("the cat sat") == ours.classify(["the cat sat"])
    assert ours.classify(ours.encode("the cat sat")[:]) != []


@pytest.mark.parametrize(
    ("changes", "function"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
    ],
)
def test_what_is_applied_to_the_scores(tmp_path, changes, function):
    model = write_bert(tmp_path, transformers.BertForSequenceClassification, id2label=NAMES)
    settings(tmp_path, **changes)
    ours = clearhead.load(tmp_path)
    (row,) = expected_scores(model, ours, ["the cat sat"])
    assert list(ours.classify("the cat sat")[0].scores.values()) == pytest.approx(function(row).tolist(), abs=1e-5)


def test_ranking(tmp_path):
    model = write_bert(tmp_path, transformers.BertForSequenceClassification, num_labels=1)
    ours = clearhead.load(tmp_path)
    documents = ["a cat sat on the mat", "fox", "the old owl " * 20]
    found = ours.rerank("the cat", documents)
    scores = [each.score for each in found]
    assert scores == sorted(scores, reverse=True)
    assert {each.index for each in found} == {0, 1, 2}
    rows = expected_scores(model, ours, [("the cat", documents[0]), ("the cat", documents[1])])
    by_index = {each.index: each for each in found}
    assert [by_index[i].score for i in (0, 1)] == pytest.approx([row.sigmoid().item() for row in rows], abs=1e-5)
    assert by_index[1].document == "fox"
    settings(tmp_path, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    raw = {each.index: each.score for each in clearhead.load(tmp_path).rerank("the cat", documents)}
    assert raw[0] == pytest.approx(rows[0].item(), abs=1e-5)
    assert ours.rerank("the cat", []) == []


def test_tokens(tmp_path):
    model = write_bert(tmp_path, transformers.BertForTokenClassification, id2label=NAMES)
    ours = clearhead.load(tmp_path)
    texts = ["the cat sat", "a dog ran on the mat"]
    for labeled, rows, text in zip(ours.classify(texts), expected_scores(model, ours, texts), texts, strict=True):
        inner = rows.softmax(dim=-1)[1:-1]  # without [CLS] and [SEP]
        assert [each.token for each in labeled] == [f" {word}" for word in text.split()]
        assert [each.label for each in labeled] == [NAMES[int(row.argmax())] for row in inner]
        assert [each.score for each in labeled] == pytest.approx(inner.max(dim=-1).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("format", ["native", "huggingface"])
def test_saving_keeps_labels(tmp_path, format):
    write_bert(tmp_path / "a", transformers.BertForSequenceClassification, id2label=NAMES)
    settings(tmp_path / "a", problem_type="multi_label_classification")
    ours = clearhead.load(tmp_path / "a")
    again = clearhead.load(ours.save(tmp_path / "b", format=format))
    assert again.labels == ours.labels
    assert again.classify(PAIRS) == ours.classify(PAIRS)


def test_errors(tmp_path):
    write_bert(tmp_path, transformers.BertForSequenceClassification, id2label=NAMES)
    ours = clearhead.load(tmp_path)
    with pytest.raises(ClearheadError, match="there is no text to classify"):
        ours.classify([])
    with pytest.raises(ClearheadError, match="this model reads at most 24"):
        ours.classify("cat " * 30)
    assert ours.classify("cat " * 30, truncate=True)
    with pytest.raises(ClearheadError, match="this one has 3 labels"):
        ours.rerank("cat", ["dog"])
    write_bert(tmp_path / "headless")
    with pytest.raises(ClearheadError, match="has no classification head"):
        clearhead.load(tmp_path / "headless").classify([3, 4])


# --- decoders with other heads than a language head


def save_llama(folder, class_name, **changes):
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(transformers.LlamaConfig(**(LLAMA | changes))).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["Model", "ForSequenceClassification", "ForTokenClassification"])
def test_decoders_without_language_head(tmp_path, suffix):
    model = save_llama(tmp_path / "a", f"Llama{suffix}", num_labels=3)
    ours = clearhead.load(tmp_path / "a")
    tokens = torch.tensor([[2, 5, 9, 7, 11], [2, 8, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    output = model(input_ids=tokens, attention_mask=mask)
    theirs = output.last_hidden_state if suffix == "Model" else output.logits
    found = ours.network(tokens, mask)
    for row in range(2):
        real = slice(0, int(mask[row].sum())) if found.ndim == 3 else slice(None)
        assert (found[row][real] - theirs[row][real]).abs().max() <= 1e-5
    for format in ("native", "huggingface"):
        again = clearhead.load(ours.save(tmp_path / format, format=format))
        assert again.config == ours.config
        assert torch.equal(again.network(tokens, mask), found)
    reloaded = type(model).from_pretrained(tmp_path / "huggingface").eval()
    again = reloaded(input_ids=tokens, attention_mask=mask)
    assert torch.equal(again.last_hidden_state if suffix == "Model" else again.logits, theirs)
    with pytest.raises(ClearheadError, match="has no head, so it cannot generate texts"):
        ours.generate([2, 5])


def test_an_embedder_whose_config_names_the_class_with_a_head(tmp_path):
    """Embedding models are published like this; a checkpoint with a prefix but without head is still incomplete."""
    save_llama(tmp_path, "LlamaModel")
    with pytest.raises(ClearheadError, match="leave out source_language"):
        clearhead.load(tmp_path).generate([3], source_language="deu")
    settings(tmp_path, architectures=["LlamaForCausalLM"])
    vectors = clearhead.load(tmp_path).embed([[2, 5, 9], [2, 8]])
    assert vectors.shape == (2, 32)
    assert clearhead.load(tmp_path).config.head is None
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ClearheadError, match=r"lacks the tensor lm_head\.weight"):
        clearhead.load(tmp_path)


@pytest.mark.parametrize("format", ["huggingface", "native"])
def test_transformers_tokenizes_pairs_for_a_saved_model_as_we_do(tmp_path, format):
    write_bert(tmp_path / "bert", transformers.BertForSequenceClassification)
    clearhead.load(tmp_path / "bert").save(tmp_path / "saved", format=format)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved", config=transformers.BertConfig())
    encoding = tokenizer(*PAIRS[0])
    assert encoding["token_type_ids"] == [0] * 5 + [1] * 7
    names = (tokenizer.cls_token, tokenizer.sep_token, tokenizer.pad_token, tokenizer.unk_token)
    assert names == ("[CLS]", "[SEP]", "[PAD]", "[UNK]")
    assert tokenizer.model_max_length == 24
    assert len(tokenizer("cat " * 40, truncation=True)["input_ids"]) == 24


def test_transformers_tokenizes_without_token_types_for_a_saved_model_without_them(tmp_path):
    model = replace(clearhead.create("gpt2", tiny=True), tokenizer=byte_tokenizer())
    model.save(tmp_path, format="huggingface")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert set(tokenizer("a", "b")) == {"input_ids", "attention_mask"}
    assert tokenizer.model_max_length == model.config.context
