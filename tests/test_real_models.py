"""Downloaded models: SmolLM2, TinyStories and MiniLM give the results of transformers."""

import pytest
import torch
import transformers

import clearhead

pytestmark = pytest.mark.download


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return clearhead.load(smollm2_gguf)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_gguf):
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()


def test_smollm2_logits_equal_transformers(smollm2, smollm2_reference):
    tokens = torch.tensor([smollm2.encode("Transformers are read best in the clear, one file at a time.")])
    with torch.no_grad():
        assert (smollm2.network(tokens) - smollm2_reference(tokens).logits).abs().max() <= 1e-4


def test_smollm2_greedy_tokens_equal_transformers(smollm2, smollm2_reference):
    prompt = smollm2.encode("The history of the printing press begins")
    expected = smollm2_reference.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert smollm2.generate(prompt, max_new_tokens=64).tokens == expected[0, len(prompt) :].tolist()


def test_smollm2_saved_as_a_hugging_face_folder_loads_in_transformers(smollm2, smollm2_reference, tmp_path):
    smollm2.save(tmp_path, format="huggingface")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def main():\n    print('naïve café ☕')"
    assert tokenizer(text)["input_ids"] == smollm2.encode(text)
    tokens = torch.tensor([smollm2.encode(text)])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, smollm2_reference(tokens).logits)


def test_stories15m_continues_once_upon_a_time(stories15m):
    model = clearhead.load(stories15m)
    text = model.generate("Once upon a time", max_new_tokens=12).text
    assert text == ", there was a little girl named Lily. She loved"


def test_a_continuation_keeps_the_space_before_its_first_word(stories15m):
    """SentencePiece drops the leading space of a text, but a continuation does not start a text."""
    model = clearhead.load(stories15m)
    assert model.generate("Once upon", max_new_tokens=2).text == " a time"
    assert "".join(model.stream("Once upon", max_new_tokens=2)) == " a time"


def test_minilm_embeddings_equal_transformers(minilm):
    texts = ["A cat sits on the mat.", "Ein Satz.", "The weather is lovely today, is it not?"]
    ours = clearhead.load(minilm).embed(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    theirs = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    assert (ours - theirs).abs().max() <= 1e-5
