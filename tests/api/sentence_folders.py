"""Toy folders of the sentence-transformers library: a BERT with random weights, a word tokenizer and module files."""

import json
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = ["a", "the", "cat", "dog", "sat", "ran", "on", "mat", "old", "owl", "kind", "fox", "query", ":", "passage"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_tokenizer(folder: Path, lower_case: bool = False) -> tokenizers.Tokenizer:
    """Write a tokenizer of whole words with BERT's special tokens."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if lower_case:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "BertTokenizerFast"}))
    return tokenizer


def write_bert(folder: Path, model_class=transformers.BertModel, **changes):
    """Write a BERT with random weights and a tokenizer; return the model of transformers."""
    sizes = {"vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 24}
    torch.manual_seed(0)
    model = model_class(transformers.BertConfig(**(sizes | {"initializer_range": 0.4} | changes))).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_modules(folder: Path, *modules: tuple[str, dict], text=None, prompts=None) -> None:
    """Write modules.json and the config of each module after the network."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, start=1):
        path = f"{number}_{kind}"
        (folder / path).mkdir(exist_ok=True)
        tensors = config.pop("tensors", None)
        if tensors:
            save_file(tensors, folder / path / "model.safetensors")
        if config:
            (folder / path / "config.json").write_text(json.dumps(config))
        kind_path = f"sentence_transformers.models.{kind}"
        entries.append({"idx": number, "name": str(number), "path": path, "type": kind_path})
    (folder / "modules.json").write_text(json.dumps(entries))
    if text is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(text))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
