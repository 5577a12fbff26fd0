"""A saved trace: what comes back, and what is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.inspection.trace import Trace
from tests.book.shrink import shrink
from tests.model.toys import decoder, toy, translator

TOKENS, SOURCE = [3, 14, 15, 9, 2, 6, 5], [2, 7, 18, 28]


@pytest.mark.parametrize("name", ["gemma-3-1b", "deepseek-v3", "gopher-280b", "grok-2", "llama-4-scout", "t5-small"])
def test_what_is_saved_comes_back(name, tmp_path):
    model = Model(toy(shrink(preset(name))))
    source = SOURCE if model.config.is_encoder_decoder else None
    traced = model.trace(TOKENS, source)
    path = traced.save(tmp_path / "trace.safetensors")
    for back in (Trace.load(path), Trace.load(path, model.network)):
        assert (back.tokens, back.token_texts, back.config) == (traced.tokens, traced.token_texts, traced.config)
        assert (back.source_tokens, back.source_texts) == (traced.source_tokens, traced.source_texts)
        for stack in traced.states:
            for layer in range(traced.num_layers_of(stack)):
                assert torch.equal(back.residual(layer, stack), traced.residual(layer, stack))
                assert torch.equal(back.attention(layer, stack=stack), traced.attention(layer, stack=stack))
                assert torch.equal(back.scores(layer, 1, stack=stack), traced.scores(layer, 1, stack=stack))
                assert torch.equal(back.values(layer, 1, stack), traced.values(layer, 1, stack))
        if source is not None:
            assert torch.equal(back.cross_attention(0), traced.cross_attention(0))
    assert torch.equal(back.logits, traced.logits)
    assert torch.equal(back.feed_forward(0), traced.feed_forward(0))
    with pytest.raises(ClearheadError, match=r"Trace\.load\(path, model\.network\)"):
        Trace.load(path).logits  # noqa: B018


@pytest.fixture
def saved(tmp_path):
    return Model(toy(translator())).trace(TOKENS, SOURCE).save(tmp_path / "trace.safetensors")


def rewrite(path, change_tensors=None, change_described=None):
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["clearhead.trace"])
    if change_tensors is not None:
        change_tensors(tensors)
    if change_described is not None:
        change_described(described)
    save_file(tensors, path, metadata={"clearhead.trace": json.dumps(described)})


def test_every_tensor_is_needed_or_checked(saved):
    names = list(load_file(saved))
    assert len(names) == 26
    whole = saved.read_bytes()
    for name in names:
        for change in (lambda t, n=name: t.pop(n), lambda t, n=name: t.update({n: t[n][..., :0].contiguous()})):
            saved.write_bytes(whole)
            rewrite(saved, change_tensors=change)
            with pytest.raises(ClearheadError, match=name.rpartition(".")[0].replace(".", r"\.")):
                Trace.load(saved)


DESCRIPTIONS = {
    "not a trace of format 1": lambda d: d.update(format=2),
    "ModelConfig.width is -1": lambda d: d["model"].update(width=-1),
    "key in .*scoring": lambda d: d["scoring"].update(other=[]),
    "scoring.cross must have 2 layers": lambda d: d["scoring"].update(cross=[]),
    "token_texts must be a list of texts": lambda d: d.update(token_texts=[1]),
    "token_texts must have one text": lambda d: d["token_texts"].pop(),
    "source_texts must": lambda d: d["source_texts"].pop(),
    "wrong shape": lambda d: d["model"].update(width=32),
}


@pytest.mark.parametrize("message", DESCRIPTIONS)
def test_wrong_descriptions(saved, message):
    rewrite(saved, change_described=DESCRIPTIONS[message])
    with pytest.raises(ClearheadError, match=message):
        Trace.load(saved)


def test_other_files(saved, tmp_path):
    with pytest.raises(ClearheadError, match="there is no file"):
        Trace.load(tmp_path / "none.safetensors")
    with pytest.raises(ClearheadError, match="another model"):
        Trace.load(saved, toy(decoder()))
    with pytest.raises(ClearheadError, match=r"float64; load the model in that precision, not in torch\.bfloat16"):
        Trace.load(saved, toy(translator(), torch.bfloat16))
    whole = saved.read_bytes()
    for broken in (b"", b"\x00" * 64, whole[:-5], whole[:300]):
        saved.write_bytes(broken)
        with pytest.raises(ClearheadError, match="not a saved trace"):
            Trace.load(saved)
    save_file({"x": torch.zeros(1)}, saved)
    with pytest.raises(ClearheadError, match=r"trace\.save"):
        Trace.load(saved)
