"""Models that are split into several GGUF files, as llama-gguf-split writes them."""

import re

import gguf
import numpy as np
import pytest
import torch

from clearhead.checkpoint.formats import open_model, read_config
from clearhead.checkpoint.gguf import open_gguf
from clearhead.errors import ClearheadError
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.tiny import same_network


def split(path, folder, count, *, changes=None):
    """Write the tensors of a file to `count` parts; the first one has all metadata. `changes`: part -> split keys."""
    file, parts = open_gguf(path), []
    names = list(file.tensors)
    for number in range(count):
        part = folder / f"model-{number + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(part, str(file.metadata["general.architecture"]) if number == 0 else "llama")
        keys = {"no": number, "count": count, "tensors.count": len(names)} | (changes or {}).get(number, {})
        for key, value in keys.items():
            writer.add_uint32(f"split.{key}", value)
        if number == 0:
            for field in gguf.GGUFReader(path).fields.values():
                if not field.name.startswith(("GGUF", "general.architecture")):
                    writer.add_key_value(field.name, field.contents(), *field.types[:1], *field.types[1:2])
        for name in names[number * len(names) // count : (number + 1) * len(names) // count]:
            tensor = file.tensors[name]
            blocks = file.read_blocks(name).reshape(*tensor.shape[:-1], -1)
            kind = gguf.GGMLQuantizationType[tensor.block_type.name]
            writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


@pytest.fixture
def whole(tmp_path):
    return write_file(tmp_path / "whole.gguf", "qwen3", kind=gguf.GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize("count", [2, 3])
def test_a_split_model_equals_the_whole_one_whichever_part_is_given(tmp_path, whole, count):
    expected = open_model(whole)
    parts = split(whole, tmp_path, count)
    for part in parts:
        loaded = open_model(part)
        assert same_network(loaded.network, expected.network)
        assert loaded.tokenizer is not None
        assert read_config(part) == expected.network.config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"no": 2}}, "does not belong to"),
        ({1: {"count": 2}}, "does not belong to"),
        ({0: {"count": 2}}, r"one of 2 parts of a model; the parts must be named .*-00001-of-00002\.gguf"),
        ({0: {"tensors.count": 7}}, "there must be 7"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, whole, changes, message):
    with pytest.raises(ClearheadError, match=message):
        open_model(split(whole, tmp_path, 3, changes=changes)[0])


def test_the_error_names_the_missing_part(tmp_path, whole):
    first, second, third = split(whole, tmp_path, 3)
    second.unlink()
    with pytest.raises(ClearheadError, match=re.escape(f"{second} is missing; the model is split into 3 files")):
        open_model(third)
    first.unlink()
    with pytest.raises(ClearheadError, match="its first part, 00001, is missing"):
        open_model(third)


def test_a_tensor_may_not_be_in_two_parts(tmp_path, whole):
    first, second = split(whole, tmp_path, 2)
    names = list(open_gguf(whole).tensors)
    stored = second.read_bytes()
    last = names[-1].encode()
    other = next(name for name in names if len(name) == len(last) and name in first.read_bytes().decode("latin-1"))
    second.write_bytes(stored.replace(last, other.encode()))
    with pytest.raises(ClearheadError, match="is also in another part"):
        open_model(first)


def test_an_unsplit_file_may_have_the_name_of_a_part(tmp_path, whole):
    renamed = whole.rename(tmp_path / "model-00002-of-00003.gguf")
    assert torch.is_tensor(open_model(renamed).network.decoder.final_norm.weight)
