"""Grok 1 and 2: norms before and after each branch, capped scores, two of eight large experts without renormalization.

Sources: xAI's model.py and run.py (2024) for Grok 1; the config.json of Grok 2 (2025) and the `grok.py` of sglang,
which xAI recommends for serving it. Grok 2 adds a dense feed-forward beside the experts, also caps the router and the
logits, and multiplies scores beyond 1024 tokens by a temperature. Two points are not settled: its GELU (sglang declares
tanh, its kernel computes erf) and its rope_type "original"; we use tanh and no scaling.
"""

from clearhead.architecture import Experts, GroupedAttention, Head, ModelConfig, RmsNorm, Rope, Router, ScoreTemperature
from clearhead.families.family import Family
from clearhead.families.llama_style import decoder_only_config, gated_feed_forward
from clearhead.families.tensor_rules import LAYER, Copy, NameTable


def grok_config(
    *,
    width: int,
    num_layers: int,
    attention: GroupedAttention,
    experts: Experts,
    head: Head,
    embedding_scale: float,
    context: int,
    vocab_size: int = 131072,
    epsilon: float = 1e-5,
) -> ModelConfig:
    """Return a config whose layers are all equal."""
    return decoder_only_config(
        width=width,
        context=context,
        vocab_size=vocab_size,
        attentions=[attention] * num_layers,
        feed_forwards=[experts] * num_layers,
        norm=RmsNorm(epsilon=epsilon, scale_in_float32=True),
        head=head,
        placement="sandwich",
        embedding_scale=embedding_scale,
    )


def _grok1_preset() -> ModelConfig:
    experts = Experts(
        num_experts=8, num_chosen=2, expert=gated_feed_forward(32768, "gelu_tanh"), router=Router(score="softmax")
    )
    return grok_config(
        width=6144,
        num_layers=64,
        attention=GroupedAttention(num_heads=48, num_kv_heads=8, head_width=128, position=Rope(), softcap=30.0),
        experts=experts,
        head=Head(tied=True, scale=0.5773502691896257),
        embedding_scale=78.38367176906169,
        context=8192,
    )


def _grok2_preset() -> ModelConfig:
    attention = GroupedAttention(
        num_heads=64,
        num_kv_heads=8,
        head_width=128,
        position=Rope(theta=208533496.0),
        softcap=30.0,
        temperature=ScoreTemperature(length=1024),
    )
    experts = Experts(
        num_experts=8,
        num_chosen=2,
        expert=gated_feed_forward(16384, "gelu_tanh"),
        router=Router(score="softmax", softcap=30.0),
        shared=gated_feed_forward(32768, "gelu_tanh"),
        divisor=2**0.5,
    )
    return grok_config(
        width=8192,
        num_layers=64,
        attention=attention,
        experts=experts,
        head=Head(tied=False, scale=0.5, softcap=50.0),
        embedding_scale=90.50966799187809,
        context=131072,
    )


def transposed(own_name: str) -> Copy:
    return Copy((own_name,), transposed=True)


# --- tensor names

# Haiku's module paths, each followed by the parameter's name; matrices are stored (in, out)
_DECODER = "transformer/decoder_layer_{layer}"
GROK1_NAMES: NameTable = {
    "language_model/in_out_embed/embeddings": "decoder.embedding.tokens.weight",
    f"{_DECODER}/multi_head_attention/query/w": transposed(f"{LAYER}.attention.query.weight"),
    f"{_DECODER}/multi_head_attention/key/w": transposed(f"{LAYER}.attention.key.weight"),
    f"{_DECODER}/multi_head_attention/value/w": transposed(f"{LAYER}.attention.value.weight"),
    f"{_DECODER}/multi_head_attention/linear/w": transposed(f"{LAYER}.attention.output.weight"),
    f"{_DECODER}/router/w": transposed(f"{LAYER}.feed_forward.router.weight"),
    f"{_DECODER}/moe/linear/w": transposed(f"{LAYER}.feed_forward.gate"),
    f"{_DECODER}/moe/linear_v/w": transposed(f"{LAYER}.feed_forward.up"),
    f"{_DECODER}/moe/linear_1/w": transposed(f"{LAYER}.feed_forward.down"),
    f"{_DECODER}/rms_norm/scale": f"{LAYER}.attention_residual.norm.weight",
    f"{_DECODER}/rms_norm_1/scale": f"{LAYER}.attention_residual.branch_norm.weight",
    f"{_DECODER}/rms_norm_2/scale": f"{LAYER}.feed_forward_residual.norm.weight",
    f"{_DECODER}/rms_norm_3/scale": f"{LAYER}.feed_forward_residual.branch_norm.weight",
    "language_model/rms_norm/scale": "decoder.final_norm.weight",
}
# Names of whole tensors; the released files hold the eight slices of tensor-parallel serving.
GROK2_NAMES: NameTable = {
    "model.embed_tokens.weight": "decoder.embedding.tokens.weight",
    "model.layers.{layer}.self_attn.q_proj.weight": f"{LAYER}.attention.query.weight",
    "model.layers.{layer}.self_attn.k_proj.weight": f"{LAYER}.attention.key.weight",
    "model.layers.{layer}.self_attn.v_proj.weight": f"{LAYER}.attention.value.weight",
    "model.layers.{layer}.self_attn.o_proj.weight": f"{LAYER}.attention.output.weight",
    "model.layers.{layer}.pre_attn_norm.weight": f"{LAYER}.attention_residual.norm.weight",
    "model.layers.{layer}.post_attn_norm.weight": f"{LAYER}.attention_residual.branch_norm.weight",
    "model.layers.{layer}.pre_moe_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "model.layers.{layer}.post_moe_norm.weight": f"{LAYER}.feed_forward_residual.branch_norm.weight",
    "model.layers.{layer}.mlp.gate_proj.weight": f"{LAYER}.feed_forward.shared.gate.weight",
    "model.layers.{layer}.mlp.up_proj.weight": f"{LAYER}.feed_forward.shared.up.weight",
    "model.layers.{layer}.mlp.down_proj.weight": f"{LAYER}.feed_forward.shared.down.weight",
    "model.layers.{layer}.block_sparse_moe.gate.weight": f"{LAYER}.feed_forward.router.weight",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight": f"{LAYER}.feed_forward.gate[{{expert}}]",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight": f"{LAYER}.feed_forward.down[{{expert}}]",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight": f"{LAYER}.feed_forward.up[{{expert}}]",
    "model.norm.weight": "decoder.final_norm.weight",
    "lm_head.weight": "head.weight",
}

GROK1 = Family(name="grok1", presets={"grok-1": _grok1_preset}, tensor_names=GROK1_NAMES)
GROK2 = Family(name="grok2", presets={"grok-2": _grok2_preset}, tensor_names=GROK2_NAMES)
FAMILIES = (GROK1, GROK2)
