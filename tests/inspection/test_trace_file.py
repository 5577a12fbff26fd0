"""Test saved traces: what is restored, and which files are refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.inspection.trace import Trace
from tests.model.toys import decoder, toy, translator
from tests.toy_presets import shrink

TOKENS, SOURCE = [3, 14, 15, 9, 2, 6, 5], [2, 7, 18, 28]


@pytest.mark.parametrize(
    "name", ["gemma-3-1b", "deepseek-v3", "gopher-280b", "grok-2", "llama-4-scout", "t5-small", "gpt-oss-20b"]
)
def test_save_and_load_restore_the_trace(name, tmp_path):
    model = Model(toy(shrink(preset(name))))
    source = SOURCE if model.config.is_encoder_decoder else None
    traced = model.trace(TOKENS, source)
    path = traced.save(tmp_path / "trace.safetensors")
    for loaded in (Trace.load(path), Trace.load(path, model.network)):
        assert (loaded.tokens, loaded.token_texts, loaded.config) == (traced.tokens, traced.token_texts, traced.config)
        assert (loaded.source_tokens, loaded.source_texts) == (traced.source_tokens, traced.source_texts)
        for stack in traced.residuals:
            for layer in range(traced.num_layers_of(stack)):
                assert torch.equal(loaded.residual(layer, stack), traced.residual(layer, stack))
                assert torch.equal(loaded.attention(layer, stack=stack), traced.attention(layer, stack=stack))
                assert torch.equal(loaded.scores(layer, 1, stack=stack), traced.scores(layer, 1, stack=stack))
                assert torch.equal(loaded.values(layer, 1, stack), traced.values(layer, 1, stack))
        if source is not None:
            assert torch.equal(loaded.cross_attention(0), traced.cross_attention(0))
    assert torch.equal(loaded.logits, traced.logits)
    assert torch.equal(loaded.feed_forward_output(0), traced.feed_forward_output(0))
    with pytest.raises(ClearheadError, match=r"Trace\.load\(path, model\.network\)"):
        Trace.load(path).logits  # noqa: B018


@pytest.fixture
def saved_trace(tmp_path):
    return Model(toy(translator())).trace(TOKENS, SOURCE).save(tmp_path / "trace.safetensors")


def rewrite(path, change_tensors=None, change_metadata=None):
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["clearhead.trace"])
    if change_tensors is not None:
        change_tensors(tensors)
    if change_metadata is not None:
        change_metadata(metadata)
    save_file(tensors, path, metadata={"clearhead.trace": json.dumps(metadata)})


def test_a_missing_or_misshapen_tensor_raises(saved_trace):
    names = list(load_file(saved_trace))
    assert len(names) == 26
    content = saved_trace.read_bytes()
    for name in names:
        for change in (lambda t, n=name: t.pop(n), lambda t, n=name: t.update({n: t[n][..., :0].contiguous()})):
            saved_trace.write_bytes(content)
            rewrite(saved_trace, change_tensors=change)
            with pytest.raises(ClearheadError, match=name.rpartition(".")[0].replace(".", r"\.")):
                Trace.load(saved_trace)


WRONG_METADATA = {
    "not a trace of format 1": lambda d: d.update(format=2),
    "model.width is -1": lambda d: d["model"].update(width=-1),
    "key in .*scoring": lambda d: d["scoring"].update(other=[]),
    "scoring.cross must have 2 layers": lambda d: d["scoring"].update(cross=[]),
    "token_texts must be a list of strings": lambda d: d.update(token_texts=[1]),
    "token_texts must have one text": lambda d: d["token_texts"].pop(),
    "source_texts must": lambda d: d["source_texts"].pop(),
    "wrong shape": lambda d: d["model"].update(width=32),
}


@pytest.mark.parametrize("message", WRONG_METADATA)
def test_wrong_metadata_raises(saved_trace, message):
    rewrite(saved_trace, change_metadata=WRONG_METADATA[message])
    with pytest.raises(ClearheadError, match=message):
        Trace.load(saved_trace)


def test_other_files_and_models_raise(saved_trace, tmp_path):
    with pytest.raises(ClearheadError, match=r"does not exist; trace\.save"):
        Trace.load(tmp_path / "none.safetensors")
    with pytest.raises(ClearheadError, match="another model"):
        Trace.load(saved_trace, toy(decoder()))
    with pytest.raises(ClearheadError, match=r"float64; load the model in that dtype, not in torch\.bfloat16"):
        Trace.load(saved_trace, toy(translator(), torch.bfloat16))
    content = saved_trace.read_bytes()
    for broken in (b"", b"\x00" * 64, content[:-5], content[:300]):
        saved_trace.write_bytes(broken)
        with pytest.raises(ClearheadError, match="not a complete safetensors file"):
            Trace.load(saved_trace)
    save_file({"x": torch.zeros(1)}, saved_trace)
    with pytest.raises(ClearheadError, match=r"trace\.save"):
        Trace.load(saved_trace)
