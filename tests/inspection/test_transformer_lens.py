"""The activations of run_with_cache compared with TransformerLens itself, if a version with HookedTransformer is there.

Version 2.16 has it, version 4 has not.
"""

import pytest
import torch

import clearhead
from tests.parity.test_config_fields import toy_data
from tests.parity.test_modules import toy_module

transformer_lens = pytest.importorskip("transformer_lens", reason="TransformerLens is not installed")
try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions
except ImportError:
    pytest.skip("this version of TransformerLens has no HookedTransformer", allow_module_level=True)

TOKENS = torch.randint(6, 90, (2, 9), generator=torch.Generator().manual_seed(3))
SIZES = {"n_layers": 2, "d_model": 48, "n_heads": 4, "d_head": 12, "d_mlp": 80, "n_ctx": 128, "d_vocab": 97}
SIZES |= {"device": "cpu", "default_prepend_bos": False}
SETTINGS = {
    "gpt2": ({"act_fn": "gelu_new", "normalization_type": "LN", "eps": 1e-2}, "convert_gpt2_weights"),
    "gpt_neox": (
        {"act_fn": "gelu", "normalization_type": "LN", "eps": 1e-2, "positional_embedding_type": "rotary"}
        | {"rotary_dim": 6, "rotary_adjacent_pairs": False, "parallel_attn_mlp": True},
        "convert_neox_weights",
    ),
    "llama": (
        {"act_fn": "silu", "normalization_type": "RMS", "eps": 1e-2, "positional_embedding_type": "rotary"}
        | {"rotary_dim": 12, "rotary_adjacent_pairs": False, "gated_mlp": True, "final_rms": True}
        | {"n_key_value_heads": 2},
        "convert_llama_weights",
    ),
}


def hooked_model(model_type, module):
    """Return TransformerLens's model with the weights of a module of transformers."""
    settings, convert = SETTINGS[model_type]
    config = HookedTransformerConfig(**SIZES, **settings)
    model = HookedTransformer(config)
    if not hasattr(module, "embed_out"):
        module.embed_out = module.get_output_embeddings()  # the name in the transformers that this version was made for
    state = getattr(weight_conversions, convert)(module, config)
    model.load_state_dict(state, strict=False)
    return model


@torch.no_grad()
@pytest.mark.parametrize("model_type", SETTINGS)
def test_every_activation_has_the_name_the_shape_and_the_values_of_transformer_lens(model_type):
    module = toy_module(toy_data(model_type))
    model = clearhead.from_huggingface(module)
    theirs = hooked_model(model_type, module)
    expected_logits, expected = theirs.run_with_cache(TOKENS)
    logits, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=2e-5)
    assert set(cache) == set(expected)
    for name in expected:
        ours = cache[name].expand_as(expected[name]) if name == "hook_pos_embed" else cache[name]
        torch.testing.assert_close(
            ours, expected[name], rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(cache["pattern", 1], cache["blocks.1.attn.hook_pattern"])
    torch.testing.assert_close(cache.stack_activation("z"), expected.stack_activation("z"), rtol=0, atol=2e-5)
    torch.testing.assert_close(cache.accumulated_resid(), expected.accumulated_resid(), rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("model_type", SETTINGS)
@pytest.mark.parametrize(
    "name", ["blocks.1.attn.hook_z", "blocks.0.attn.hook_pattern", "blocks.1.hook_resid_pre", "blocks.0.ln1.hook_scale"]
)
def test_an_ablation_gives_the_logits_of_transformer_lens(model_type, name):
    module = toy_module(toy_data(model_type))
    model = clearhead.from_huggingface(module)
    theirs = hooked_model(model_type, module)

    def ablate(value, hook):
        value[:, 2:5] *= 0.5
        return value

    expected = theirs.run_with_hooks(TOKENS, fwd_hooks=[(name, ablate)])
    ours = model.run_with_hooks(TOKENS, fwd_hooks=[(name, ablate)])
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)
    assert (ours - model.network(TOKENS)).abs().max() > 1e-3
