"""Compare attention weights of a trace with transformers' eager output_attentions, and count kernel calls."""

import pytest
import torch
import transformers

import clearhead
from clearhead.inspection.recording import StackInputs
from clearhead.inspection.tracing import record
from clearhead.model import attend
from tests.parity import test_bart, test_bert, test_deepseek, test_gemma, test_gpt, test_llama, test_t5
from tests.parity.harness import build_reference, load_network, make_inputs

CASES = {
    "gpt2": test_gpt.CASES,
    "llama": test_llama.CASES,
    "mistral": test_llama.CASES,
    "gemma3": test_gemma.CASES,
    "masked-language": test_bert.CASES,
    "t5": test_t5.CASES,
    "marian": test_bart.CASES,
    "v3": test_deepseek.CASES,
}


@pytest.fixture
def kernel_calls(monkeypatch):
    """Return a list that grows with each call of PyTorch's fused kernel."""
    calls = []
    kernel = attend.scaled_dot_product_attention

    def counted(*arguments, **options):
        calls.append(arguments[0].shape)
        return kernel(*arguments, **options)

    monkeypatch.setattr(attend, "scaled_dot_product_attention", counted)
    return calls


def trace_sequences(network, given):
    """Yield each sequence of the batch with its trace."""
    for row in range(2):
        part = {name: tensor[row : row + 1] for name, tensor in given.items()}
        if "target" in part:
            source = StackInputs(part["source"], part["source_mask"])
            yield row, record(network, StackInputs(part["target"], part["target_mask"]), source)
        else:
            yield row, record(network, StackInputs(part["tokens"], part["attention_mask"], part["position_ids"]))


def reference_weights(model, case, given):
    """Return the weights (B, N, T, S) of each layer by kind of attention, as computed by transformers."""
    options = {"output_attentions": True} | ({"use_cache": False} if hasattr(model.config, "use_cache") else {})
    if "target" in given:
        named = {"input_ids": given["source"], "attention_mask": given["source_mask"]}
        named |= {"decoder_input_ids": given["target"], "decoder_attention_mask": given["target_mask"]}
        output = model(**named, **options)
        kinds = (output.encoder_attentions, output.decoder_attentions, output.cross_attentions)
        return dict(zip(("encoder", "decoder", "cross"), kinds, strict=True))
    named = {"input_ids": given["tokens"], "attention_mask": given["attention_mask"]}
    named |= {"position_ids": given["position_ids"]} if case.takes_position_ids else {}
    return {"self": model(**named, **options).attentions}


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_weights_equal_those_of_transformers(name, padded, tmp_path, kernel_calls):
    case = next(case for case in CASES[name] if case.name == name)
    model = build_reference(case)
    network = load_network(model, tmp_path)
    given = make_inputs(case, network.config, padded)
    expected_weights = reference_weights(model, case, given)
    real = given.get("attention_mask", given.get("source_mask")).bool()
    for row, traced in trace_sequences(network, given):
        num_layers = sum(traced.num_layers_of(stack) for stack in traced.residuals)
        num_cross = traced.num_layers if "cross" in expected_weights else 0
        assert len(kernel_calls) == num_layers + num_cross
        for kind, layers in expected_weights.items():
            queries = slice(None) if kind in ("decoder", "cross") else real[row]
            for layer, expected in enumerate(layers):
                if kind == "cross":
                    found = traced.cross_attention(layer)
                else:
                    found = traced.attention(layer, stack=None if kind == "self" else kind)
                assert (found - expected[row])[:, queries].abs().max() <= 1e-5, f"{kind} {layer}"
        recomputed = sum(traced.num_layers_of(stack) + 1 - len(kept) for stack, kept in traced.residuals.items())
        recomputed += traced.num_layers_of("decoder") + 1 - len(traced.residuals["decoder"]) if num_cross else 0
        needed = num_layers + num_cross * 2 + recomputed
        assert len(kernel_calls) == needed, (
            "expected one call per layer, per recomputed layer and per self-attention below a cross-attention"
        )
        kernel_calls.clear()


@pytest.mark.download
@torch.no_grad()
def test_weights_of_smollm2_equal_those_of_transformers(smollm2_gguf, kernel_calls, tmp_path):
    """transformers reads a folder in a tenth of the time of a GGUF file; tests/test_real_models.py compares both."""
    model = clearhead.load(smollm2_gguf)
    model.save(tmp_path, format="huggingface")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    traced = model.trace("The capital of France is Paris, and the capital of Italy is")
    assert len(kernel_calls) == traced.num_layers == 30
    expected_weights = reference(torch.tensor([traced.tokens]), output_attentions=True).attentions
    for layer, expected in enumerate(expected_weights):
        assert (traced.attention(layer) - expected[0]).abs().max() <= 1e-5
    assert traced.token_texts[1] == " capital"
    assert traced.logits[-1].argmax() == model.encode(" Rome")[0]
