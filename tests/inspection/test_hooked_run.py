"""Activations by the names of TransformerLens: equal to those of hooks in transformers; interventions; shorthands."""

import pytest
import torch

import clearhead
from clearhead.api import create
from clearhead.errors import ClearheadError
from clearhead.inspection.activation_cache import activation_name
from tests.parity.harness import randomize
from tests.parity.test_config_fields import toy_data
from tests.parity.test_modules import toy_module

TOKENS = torch.randint(6, 90, (2, 9), generator=torch.Generator().manual_seed(3))
KINDS = ("gpt2", "pythia-160m", "gpt-j-6b", "gemma-2-2b", "olmo-2-1b", "bert-base", "mixtral-8x7b", "gpt-oss-20b")
KINDS += ("bloom-560m", "deepseek-v2-lite", "albert-base", "granite-3.1-2b", "modernbert-base")
BATCH, LENGTH, HEADS, WIDTH = 2, 9, 4, 48


def captured(module, paths):
    """Run a module of transformers; return the input and output of the submodules at these paths."""
    values = {}
    for path in paths:

        def keep(part, inputs, keywords, output, path=path):
            given = inputs[0] if inputs else next(iter(keywords.values()))
            values[path] = (given, output[0] if isinstance(output, tuple) else output)

        module.get_submodule(path).register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        output = module(TOKENS, output_attentions=True)
    return values, output


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_activations_of_gpt2_are_those_of_transformers():
    module = toy_module(toy_data("gpt2"))
    logits, cache = clearhead.from_huggingface(module).run_with_cache(TOKENS)
    block = "transformer.h.1"
    parts = ("", ".ln_1", ".ln_2", ".attn.c_attn", ".attn.c_proj", ".attn", ".mlp.c_fc", ".mlp.c_proj")
    theirs, output = captured(
        module, ["transformer.wte", "transformer.wpe", "transformer.ln_f", *[block + p for p in parts]]
    )
    close(logits, output.logits)
    close(cache["embed"], theirs["transformer.wte"][1])
    close(cache["pos_embed"], theirs["transformer.wpe"][1][:1])
    close(cache["resid_pre", 1], theirs[block][0])
    close(cache["resid_post", 1], theirs[block][1])
    close(cache["resid_mid", 1], theirs[f"{block}.ln_2"][0])
    close(cache["normalized", 1, "ln1"], theirs[f"{block}.ln_1"][1])
    close(cache["normalized", 1, "ln2"], theirs[f"{block}.ln_2"][1])
    q, k, v = theirs[f"{block}.attn.c_attn"][1].view(BATCH, LENGTH, 3, HEADS, -1).unbind(2)
    for name, value in (("q", q), ("k", k), ("v", v)):
        close(cache[name, 1], value)
    close(cache["pattern", 1], output.attentions[1])
    close(cache["z", 1].flatten(-2), theirs[f"{block}.attn.c_proj"][0])
    close(cache["attn_out", 1], theirs[f"{block}.attn"][1])
    close(cache["pre", 1], theirs[f"{block}.mlp.c_fc"][1])
    close(cache["post", 1], theirs[f"{block}.mlp.c_proj"][0])
    close(cache["mlp_out", 1], theirs[f"{block}.mlp.c_proj"][1])
    close(cache["ln_final.hook_normalized"], theirs["transformer.ln_f"][1])


@torch.no_grad()
def test_activations_of_llama_are_those_of_transformers():
    module = toy_module(toy_data("llama"))
    logits, cache = clearhead.from_huggingface(module).run_with_cache(TOKENS)
    block = "model.layers.1"
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    parts += ("mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    theirs, output = captured(module, [f"{block}.{part}" for part in parts])
    close(logits, output.logits)
    for name, part in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")):
        close(cache[name, 1].flatten(-2), theirs[f"{block}.self_attn.{part}"][1])
    assert cache["k", 1].shape == (BATCH, LENGTH, 2, WIDTH // HEADS)
    close(cache["pattern", 1], output.attentions[1])
    close(cache["z", 1].flatten(-2), theirs[f"{block}.self_attn.o_proj"][0])
    close(cache["pre", 1], theirs[f"{block}.mlp.gate_proj"][1])
    close(cache["pre_linear", 1], theirs[f"{block}.mlp.up_proj"][1])
    close(cache["post", 1], theirs[f"{block}.mlp.down_proj"][0])
    norm = module.model.layers[1].input_layernorm
    close(cache["normalized", 1, "ln1"] * norm.weight, theirs[f"{block}.input_layernorm"][1])
    stream = cache["resid_pre", 1]
    close(cache["scale", 1, "ln1"], (stream.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt())


@torch.no_grad()
@pytest.mark.parametrize("preset", KINDS)
def test_every_kind_of_block_runs_with_hooks_and_sums_up(preset):
    """The logits are those of the network, and what the branches add leads from one residual stream to the next."""
    model = create(preset, tiny=True).to(dtype="float64")
    torch.manual_seed(1)
    randomize(model.network)
    logits, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(logits, model.network(TOKENS), rtol=0, atol=1e-10)
    if ("resid_mid", 0) in cache:
        stream = cache["resid_pre", 0] + cache["attn_out", 0]
        torch.testing.assert_close(cache["resid_mid", 0], stream, rtol=0, atol=1e-10)
    else:
        stream = cache["resid_pre", 0] + cache["attn_out", 0] + cache["mlp_out", 0]
        torch.testing.assert_close(cache["resid_post", 0], stream, rtol=0, atol=1e-10)
    weights = cache.stack_activation("pattern")
    assert weights.shape[0] == len(model.config.output_stack.layers)
    assert (weights.sum(-1) <= 1 + 1e-5).all()


@torch.no_grad()
def test_hooks_change_activations_and_leave_the_model_alone():
    model = create("llama-3.2-1b", tiny=True)
    before = model.network(TOKENS)
    names = []

    def ablate_head(z, hook):
        names.append((hook.name, hook.layer()))
        z[:, :, 1] = 0

    ablated = model.run_with_hooks(TOKENS, [("blocks.1.attn.hook_z", ablate_head)])
    assert names == [("blocks.1.attn.hook_z", 1)]
    width = model.config.decoder.layers[1].attention.head_width
    output = model.network.decoder.layers[1].attention.output
    kept = output.weight.detach().clone()
    output.weight.data[:, width : 2 * width] = 0
    expected = model.network(TOKENS)
    output.weight.data.copy_(kept)
    torch.testing.assert_close(ablated, expected, rtol=0, atol=1e-5)
    assert (ablated - before).abs().max() > 1e-4
    assert torch.equal(model.network(TOKENS), before)


@torch.no_grad()
@pytest.mark.parametrize(
    "point", ["hook_resid_pre", "attn.hook_q", "attn.hook_pattern", "ln2.hook_scale", "mlp.hook_post"]
)
def test_patching_all_values_of_another_text_at_one_point_is_seen(point):
    """What a point gets in another text replaces it; a point without effect would leave the logits as they are."""
    model = create("llama-3.2-1b", tiny=True)
    torch.manual_seed(1)
    randomize(model.network)
    other = TOKENS.flip(1)
    _, cache = model.run_with_cache(other)
    name = f"blocks.1.{point}"
    patched = model.run_with_hooks(TOKENS, [(lambda each: each == name, lambda value, hook: cache[hook.name])])
    assert (patched - model.network(TOKENS)).abs().max() > 1e-3
    if point == "hook_resid_pre":
        torch.testing.assert_close(patched, model.network(other), rtol=0, atol=1e-5)


def test_names_and_shorthands():
    assert activation_name("pattern", 0) == "blocks.0.attn.hook_pattern"
    assert activation_name("k", 6, "a") == "blocks.6.attn.hook_k"
    assert activation_name("pre", 2) == "blocks.2.mlp.hook_pre"
    assert activation_name("scale", 4, "ln1") == "blocks.4.ln1.hook_scale"
    assert activation_name("normalized") == "ln_final.hook_normalized"
    assert activation_name("hook_embed") == activation_name("embed") == "hook_embed"
    model = create("llama-3.2-1b", tiny=True)
    with torch.no_grad():
        logits, cache = model.run_with_cache(
            [5, 6, 7], names_filter=lambda name: "resid" in name, remove_batch_dim=True
        )
    assert logits.shape[:2] == (1, 3)
    assert all("resid" in name for name in cache)
    last = len(model.config.decoder.layers) - 1
    assert cache["resid_post", -1] is cache[f"blocks.{last}.hook_resid_post"]
    assert cache.accumulated_resid().shape == (last + 2, 3, model.config.width)
    with pytest.raises(ClearheadError, match="unknown activation"):
        cache["pattern", 0]


def test_unknown_points_and_encoder_decoders_are_refused():
    model = create("llama-3.2-1b", tiny=True)
    with pytest.raises(ClearheadError, match=r"unknown hook point 'blocks.0.attn.hook_patern'"):
        model.run_with_hooks([5, 6], [("blocks.0.attn.hook_patern", lambda value, hook: None)])
    with pytest.raises(ClearheadError, match="single stack"):
        create("t5-small", tiny=True).run_with_cache([5, 6])
