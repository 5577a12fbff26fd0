"""Unigram tokenizers (T5, XLM-R) in the metadata of GGUF files: read back, and compared with llama.cpp.

Those of other kinds are tested with the models that are saved, in tests/checkpoint/test_gguf_save.py.
"""

import gguf
import pytest
import transformers

from clearhead.checkpoint.gguf import open_gguf
from clearhead.checkpoint.gguf_writer import write_gguf
from clearhead.errors import ClearheadError
from clearhead.tokenization import load_tokenizer, tokenizer_from_gguf, tokenizer_to_gguf
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens
from tests.tokenization.samples import metaspace_unigram, sentencepiece_model, varied_strings

UNUSED = 5
OPTIONS = {
    "T5": {"bos_id": -1, "eos_id": 1, "unk_id": 2, "pad_id": 0, "normalization_rule_name": "nmt_nfkc"},
    "bytes and folded case": {"byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
    "user-defined pieces": {"user_defined_symbols": "<sep>,lamp", "normalization_rule_name": "nmt_nfkc"},
    "spaces are kept": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
}


def unigram_tokenizer(folder, name):
    (folder / "spiece.model").write_bytes(sentencepiece_model(model_type="unigram", **OPTIONS[name]))
    return load_tokenizer(folder)


def write_tokenizer(folder, tokenizer):
    """Write a file without a model, whose vocabulary has five tokens more than the tokenizer."""
    path = folder / "tokenizer.gguf"
    write_gguf(path, {"general.architecture": "t5", **tokenizer_to_gguf(tokenizer, tokenizer.vocab_size + 5)}, [])
    return path


@pytest.mark.parametrize("name", OPTIONS)
def test_a_unigram_tokenizer_keeps_its_tokens(tmp_path, name):
    tokenizer = unigram_tokenizer(tmp_path, name)
    path = write_tokenizer(tmp_path, tokenizer)
    again = tokenizer_from_gguf(open_gguf(path).metadata)
    for text in varied_strings(300, seed=3, also=("<sep>", "</s>")):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (again.bos_id, again.eos_id, again.unknown_id) == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unknown_id)
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.token_type"].contents()[-5:] == [UNUSED] * 5
    if name != "spaces are kept":  # llama.cpp reads the map only as an array of bytes
        assert fields["tokenizer.ggml.precompiled_charsmap"].types[1] == gguf.GGUFValueType.UINT8


@pytest.mark.parametrize("class_name", ["T5Tokenizer", "XLMRobertaTokenizer"])
def test_a_unigram_tokenizer_of_transformers_keeps_its_tokens(tmp_path, class_name):
    """Its normalizer and its pre-tokenizer are others, which mean the same on real texts."""
    unigram_tokenizer(tmp_path, "T5")
    transformers_class = getattr(transformers, class_name)
    (tmp_path / "spiece.model").rename(tmp_path / transformers_class.vocab_files_names["vocab_file"])
    transformers_class.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    tokenizer = load_tokenizer(tmp_path / "saved")
    again = tokenizer_from_gguf(tokenizer_to_gguf(tokenizer, tokenizer.vocab_size))
    for text in ("The keeper counts 17 lamps.", "Zürich,  naïve café\n東京", " a ", ""):
        assert again.encode(text) == tokenizer.encode(text)


def test_a_unigram_tokenizer_that_keeps_spaces_apart_is_refused():
    """SentencePiece normalizes a text as a whole, and Metaspace alone does not."""
    special = SpecialTokens(eos="</s>", pad="<pad>", unknown="<unk>")
    with pytest.raises(ClearheadError, match="cannot express this tokenizer"):
        tokenizer_to_gguf(LibraryTokenizer(metaspace_unigram(), special), 500)


@pytest.mark.slow
def test_llama_cpp_gives_the_tokens_of_a_unigram_tokenizer(tmp_path):
    """Of tokenizers with byte tokens, it encodes an unknown character as the unknown token and not as bytes."""
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = unigram_tokenizer(tmp_path, "T5")
    theirs = llama_cpp.Llama(str(write_tokenizer(tmp_path, tokenizer)), vocab_only=True, verbose=False)
    for text in ("The keeper counts 17 lamps.", "Zürich,  naïve café\n東京 ﬁne", " It's 3:45 "):
        assert theirs.tokenize(text.encode()) == tokenizer.encode(text)
    theirs.close()
