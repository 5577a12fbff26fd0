"""GPT-1, GPT-2 and GPT-Neo compared with transformers, and GPT-3 with its GPT-2 plus banded masks."""

import pytest
import torch
import transformers

from clearhead.architecture import Causal, SlidingWindow
from clearhead.families.gpt import gpt_config, multi_head_attention
from clearhead.model.attend import fused_attention, reference_attention
from clearhead.model.transformer import Transformer
from tests.parity.harness import (
    VOCAB,
    Case,
    build_reference,
    check_float64,
    check_logits,
    check_mutants,
    check_round_trip,
    float32_as_float64,
    is_detected,
    largest_difference,
    load_network,
    make_inputs,
    run_reference,
)
from tests.parity.mutants import mutants

SMALL = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "layer_norm_epsilon": 1e-3,
    "attn_implementation": "eager",
}
NEO = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": 5,
    "max_position_embeddings": 32,
    "layer_norm_epsilon": 1e-3,
    "attn_implementation": "eager",
}
BAND = 5


def gpt1(**changes):
    return lambda: transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**(SMALL | changes)))


def gpt2(**changes):
    return lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**(SMALL | changes)))


def neo(**changes):
    return lambda: transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**(NEO | changes)))


def smaller_scores(name, parameter):
    """Draw smaller queries, so that unscaled scores are of order one as scaled ones are."""
    return parameter.new_empty(parameter.shape).normal_(0, 48**-0.5 * 12**-0.5) if "q_proj" in name else None


CASES = [
    Case("gpt1", gpt1()),
    Case("gpt1-relu", gpt1(afn="relu")),
    Case("gpt2", gpt2()),
    Case("gpt2-wide-inner-exact-gelu", gpt2(n_inner=80, activation_function="gelu")),
    Case("gpt2-untied", gpt2(tie_word_embeddings=False)),
    Case("gpt2-scaled-by-depth", gpt2(scale_attn_by_inverse_layer_idx=True)),
    Case("gpt2-unscaled", gpt2(scale_attn_weights=False, n_embd=8, n_head=4)),
    Case("gpt-neo", neo(), draw=smaller_scores),
    Case("gpt-neo-all-global", neo(attention_types=[[["global"], 3]]), draw=smaller_scores),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree(case, tmp_path):
    check_logits(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree_in_float64(case, tmp_path):
    check_float64(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checkpoint_round_trip(case, tmp_path):
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_error_in_one_field_is_detected(case, tmp_path):
    assert check_mutants(case, tmp_path) >= 12


def test_reordered_attention_changes_only_rounding(tmp_path):
    check_logits(Case("gpt2-reordered", gpt2(reorder_and_upcast_attn=True)), tmp_path)


# --- GPT-3


def banded_gpt2():
    """Return transformers' GPT-2 whose odd layers attend to the last BAND tokens only."""
    model = gpt2(n_layer=4)()
    for block in model.transformer.h[1::2]:
        block.register_forward_pre_hook(apply_band)
    return model


def apply_band(block, arguments):
    """Mask the keys outside the band, as a forward pre-hook."""
    hidden, cache, mask, *rest = arguments
    outside = torch.ones(mask.shape[-2:], dtype=torch.bool).tril(-BAND)
    return hidden, cache, mask.masked_fill(outside, torch.finfo(mask.dtype).min), *rest


GPT3 = Case("gpt3", banded_gpt2)


def gpt3_config():
    patterns = (Causal(), SlidingWindow(size=BAND)) * 2
    attentions = [multi_head_attention(48, 4, pattern=pattern) for pattern in patterns]
    return gpt_config(width=48, attentions=attentions, vocab_size=VOCAB, context=32, epsilon=1e-3)


def load_banded(model, folder):
    """Return our GPT-3 with the weights of transformers' GPT-2."""
    weights = load_network(model, folder).state_dict()
    network = Transformer(gpt3_config()).to(next(iter(weights.values())).dtype).eval()
    network.load_state_dict(weights)
    return network


@pytest.mark.parametrize("padded", [False, True])
def test_gpt3_logits_agree(padded, tmp_path):
    model = build_reference(GPT3)
    network = load_banded(model, tmp_path)
    inputs = make_inputs(GPT3, network.config, padded)
    theirs = run_reference(model, GPT3, inputs)
    for kernel in (fused_attention, reference_attention):
        assert largest_difference(network(**inputs, kernel=kernel), theirs, inputs) <= 1e-5


def test_gpt3_logits_agree_in_float64(tmp_path):
    model = build_reference(GPT3, torch.float64)
    network = load_banded(model, tmp_path)
    inputs = make_inputs(GPT3, network.config, padded=True)
    with float32_as_float64():
        theirs = run_reference(model, GPT3, inputs)
    assert largest_difference(network(**inputs), theirs, inputs) <= 1e-12


def test_every_error_in_one_field_of_gpt3_is_detected(tmp_path):
    model = build_reference(GPT3)
    weights = load_banded(model, tmp_path).state_dict()
    inputs = make_inputs(GPT3, gpt3_config(), padded=True)
    theirs = run_reference(model, GPT3, inputs)
    wrong_configs = dict(mutants(gpt3_config()))
    assert len(wrong_configs) >= 40
    missed = [path for path, config in wrong_configs.items() if not is_detected(config, weights, inputs, theirs, 1e-5)]
    assert not missed
