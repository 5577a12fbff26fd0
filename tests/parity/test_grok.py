"""Grok 1 and 2 compared with their formulas, written out token by token; transformers has no class for either.

Sources as in families/grok.py: xAI's model.py for Grok 1, sglang's grok.py for what Grok 2 adds.
"""

import math

import pytest
import torch
from torch.nn.functional import gelu

from clearhead.architecture import Experts, GroupedAttention, Head, Rope, Router, ScoreTemperature
from clearhead.checkpoint.assembly import NamingScheme, assemble_network
from clearhead.checkpoint.interface import DEFAULT_OPTIONS
from clearhead.families import grok, preset
from clearhead.families.llama_style import gated_feed_forward
from clearhead.model.attend import fused_attention, reference_attention
from tests.parity.harness import VOCAB, is_detected
from tests.parity.mutants import mutants

WIDTH, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS, INNER, SHARED, LENGTH = 24, 4, 2, 8, 2, 4, 20, 28, 17
EPSILON, CAP, ROUTER_CAP, LOGIT_CAP, TEMPERATURE_FROM, THETA = 1e-3, 1.5, 0.8, 2.0, 5, 500.0


# --- the formulas for one sequence; matrices are (in, out), as in xAI's code


def rms(x, scale):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON) * scale


def rotate(x, theta):
    """Rotate the pair (j, j + H/2) of the token at t by t · theta^(-2j/H). x (T, N, H)."""
    out, half = torch.empty_like(x), x.shape[-1] // 2
    for t in range(len(x)):
        for j in range(half):
            angle = t * theta ** (-2 * j / x.shape[-1])
            u, v = x[t, :, j], x[t, :, j + half]
            out[t, :, j] = u * math.cos(angle) - v * math.sin(angle)
            out[t, :, j + half] = v * math.cos(angle) + u * math.sin(angle)
    return out


def attention(x, query, key, value, output, theta, temperature_from=None):
    q = rotate((x @ query).view(len(x), HEADS, HEAD), theta)
    k = rotate((x @ key).view(len(x), KV_HEADS, HEAD), theta)
    v = (x @ value).view(len(x), KV_HEADS, HEAD)
    rows = []
    for t in range(len(x)):
        temperature = math.log2(t) / math.log2(temperature_from) if temperature_from and t > temperature_from else 1.0
        heads = []
        for n in range(HEADS):
            kv_head = n // (HEADS // KV_HEADS)
            scores = CAP * torch.tanh((k[: t + 1, kv_head] @ q[t, n]) * HEAD**-0.5 / CAP) * temperature
            heads.append(scores.softmax(0) @ v[: t + 1, kv_head])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ output


def geglu(x, gate, up, down):
    return (gelu(x @ gate, approximate="tanh") * (x @ up)) @ down


def two_experts(x, router, gate, up, down, cap=None):
    rows = []
    for token in x:
        logits = token @ router
        if cap:
            logits = cap * torch.tanh(logits / cap)
        probabilities, best = logits.softmax(0).topk(2)
        rows.append(sum(p * geglu(token, gate[e], up[e], down[e]) for p, e in zip(probabilities, best, strict=True)))
    return torch.stack(rows)


def grok1_logits(tokens, w):
    table = w["language_model/in_out_embed/embeddings"]
    x = table[tokens] * 3.0
    for number in range(LAYERS):
        layer = {name.partition(f"decoder_layer_{number}/")[2]: tensor for name, tensor in w.items()}
        projections = (layer[f"multi_head_attention/{name}/w"] for name in ("query", "key", "value", "linear"))
        x = x + rms(attention(rms(x, layer["rms_norm/scale"]), *projections, 10000.0), layer["rms_norm_1/scale"])
        parts = (layer[f"{name}/w"] for name in ("router", "moe/linear", "moe/linear_v", "moe/linear_1"))
        x = x + rms(two_experts(rms(x, layer["rms_norm_2/scale"]), *parts), layer["rms_norm_3/scale"])
    return rms(x, w["language_model/rms_norm/scale"]) @ table.T * 0.6


def grok2_logits(tokens, w):
    x = w["model.embed_tokens.weight"][tokens] * 3.0
    for number in range(LAYERS):
        layer = {name.partition(f"layers.{number}.")[2]: tensor.T for name, tensor in w.items() if tensor.ndim == 2}
        norms = [w[f"model.layers.{number}.{name}.weight"] for name in ("pre_attn_norm", "post_attn_norm")]
        projections = (layer[f"self_attn.{name}_proj.weight"] for name in "qkvo")
        x = x + rms(attention(rms(x, norms[0]), *projections, THETA, TEMPERATURE_FROM), norms[1])
        norms = [w[f"model.layers.{number}.{name}.weight"] for name in ("pre_moe_norm", "post_moe_norm")]
        normed = rms(x, norms[0])
        dense = geglu(normed, *(layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
        parts = [
            [layer[f"block_sparse_moe.experts.{expert}.{name}.weight"] for expert in range(EXPERTS)]
            for name in ("w1", "w3", "w2")
        ]
        sparse = two_experts(normed, layer["block_sparse_moe.gate.weight"], *parts, ROUTER_CAP)
        x = x + rms((dense + sparse) / math.sqrt(2), norms[1])
    logits = rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T * 0.5
    return LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)


# --- the same models as our configs


def small_attention(**changes):
    return GroupedAttention(num_heads=HEADS, num_kv_heads=KV_HEADS, head_width=HEAD, softcap=CAP, **changes)


def small(attention, experts, head):
    return grok.grok_config(
        width=WIDTH,
        num_layers=LAYERS,
        attention=attention,
        experts=experts,
        head=head,
        embedding_scale=3.0,
        context=64,
        vocab_size=VOCAB,
        epsilon=EPSILON,
    )


def mixture(router, **changes):
    return Experts(
        num_experts=EXPERTS, num_chosen=2, expert=gated_feed_forward(INNER, "gelu_tanh"), router=router, **changes
    )


GROK1 = small(small_attention(position=Rope()), mixture(Router(score="softmax")), Head(tied=True, scale=0.6))
GROK2 = small(
    small_attention(position=Rope(theta=THETA), temperature=ScoreTemperature(length=TEMPERATURE_FROM)),
    mixture(
        Router(score="softmax", softcap=ROUTER_CAP), shared=gated_feed_forward(SHARED, "gelu_tanh"), divisor=2**0.5
    ),
    Head(tied=False, scale=0.5, softcap=LOGIT_CAP),
)


def grok1_shapes():
    yield "language_model/in_out_embed/embeddings", (VOCAB, WIDTH)
    yield "language_model/rms_norm/scale", (WIDTH,)
    for number in range(LAYERS):
        prefix = f"transformer/decoder_layer_{number}"
        for name, width in (("query", HEADS * HEAD), ("key", KV_HEADS * HEAD), ("value", KV_HEADS * HEAD)):
            yield f"{prefix}/multi_head_attention/{name}/w", (WIDTH, width)
        yield f"{prefix}/multi_head_attention/linear/w", (HEADS * HEAD, WIDTH)
        yield f"{prefix}/router/w", (WIDTH, EXPERTS)
        yield f"{prefix}/moe/linear/w", (EXPERTS, WIDTH, INNER)
        yield f"{prefix}/moe/linear_v/w", (EXPERTS, WIDTH, INNER)
        yield f"{prefix}/moe/linear_1/w", (EXPERTS, INNER, WIDTH)
        for norm in ("rms_norm", "rms_norm_1", "rms_norm_2", "rms_norm_3"):
            yield f"{prefix}/{norm}/scale", (WIDTH,)


def grok2_shapes():
    yield from (("model.embed_tokens.weight", (VOCAB, WIDTH)), ("lm_head.weight", (VOCAB, WIDTH)))
    yield "model.norm.weight", (WIDTH,)
    for number in range(LAYERS):
        prefix = f"model.layers.{number}"
        for name, width in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (width, WIDTH)
        yield f"{prefix}.self_attn.o_proj.weight", (WIDTH, HEADS * HEAD)
        yield f"{prefix}.block_sparse_moe.gate.weight", (EXPERTS, WIDTH)
        for inner, ways in (
            (SHARED, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
            *((INNER, tuple(f"block_sparse_moe.experts.{e}.{w}" for w in ("w1", "w3", "w2"))) for e in range(EXPERTS)),
        ):
            for name, shape in zip(ways, ((inner, WIDTH), (inner, WIDTH), (WIDTH, inner)), strict=True):
                yield f"{prefix}.{name}.weight", shape
        for norm in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"):
            yield f"{prefix}.{norm}.weight", (WIDTH,)


def draw_checkpoint(shapes, dtype):
    """Return tensors by name: matrices N(0, 1/width), norms around 1."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes:
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = (1 + 0.3 * normal if len(shape) == 1 else normal * WIDTH**-0.5).to(dtype)
    return tensors


CASES = {
    "grok-1": (GROK1, grok.GROK1_NAMES, grok1_shapes, grok1_logits),
    "grok-2": (GROK2, grok.GROK2_NAMES, grok2_shapes, grok2_logits),
}


def load(name, dtype=torch.float32):
    """Return our network, its inputs, and the logits of the formulas."""
    config, names, shapes, logits = CASES[name]
    tensors = draw_checkpoint(shapes(), dtype)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = {"tokens": tokens, "attention_mask": torch.ones_like(tokens)}
    network = assemble_network(config, tensors, "drawn", NamingScheme(table=names), DEFAULT_OPTIONS)
    return network, inputs, torch.stack([logits(row, tensors) for row in tokens])


@pytest.mark.parametrize("kernel", [fused_attention, reference_attention])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_logits_agree(name, dtype, tolerance, kernel):
    network, inputs, theirs = load(name, dtype)
    with torch.no_grad():
        ours = network(**inputs, kernel=kernel)
    assert ours.dtype == dtype
    assert theirs.abs().max() > 0.5
    assert (ours - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("name", CASES)
def test_every_error_in_one_field_is_detected(name):
    network, inputs, theirs = load(name)
    weights = network.state_dict()
    missed = [path for path, wrong in mutants(network.config) if not is_detected(wrong, weights, inputs, theirs, 1e-5)]
    assert not missed


@torch.no_grad()
def test_grok2_reduces_to_grok1():
    """Without its dense part and its divisor, with caps too high to matter, and before its temperature sets in."""
    first, inputs, _ = load("grok-1")
    experts = mixture(Router(score="softmax", softcap=1e6), shared=gated_feed_forward(SHARED, "gelu_tanh"))
    attention = small_attention(position=Rope(), temperature=ScoreTemperature(length=LENGTH))
    config = small(attention, experts, Head(tied=False, scale=0.6, softcap=1e6))
    second = type(first)(config)
    weights = first.state_dict() | {"head.weight": first.state_dict()["decoder.embedding.tokens.weight"]}
    for name, tensor in second.state_dict().items():
        if ".shared." in name:
            weights[name] = torch.zeros_like(tensor)
    second.load_state_dict(weights)
    assert (second(**inputs) - first(**inputs)).abs().max() <= 1e-5


@pytest.mark.parametrize(("name", "config"), [("grok-1", GROK1), ("grok-2", GROK2)])
def test_presets_differ_from_the_toy_configs_only_in_numbers(name, config):
    """The released sizes therefore compute what is compared here."""

    def structure(part):
        if hasattr(part, "__dataclass_fields__"):
            return type(part), {key: structure(value) for key, value in vars(part).items()}
        if isinstance(part, tuple):
            return [structure(part[0])]
        return type(part) if isinstance(part, (int, float)) else part

    assert structure(preset(name)) == structure(config)
