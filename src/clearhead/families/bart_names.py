"""The tensor names of BART, mBART, Marian, Pegasus and M2M-100, and of their relatives for long sources.

Family(name="bart", presets={}, tensor_names=NAMES, duplicates=DUPLICATES, ignored_tensors=IGNORED_TENSORS)
"""

from collections.abc import Mapping

from clearhead.families.tensor_rules import Copy, NameTable, SingleRow

_LAYER_PARTS = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.out_proj": "attention.output",
    "self_attn_layer_norm": "attention_residual.norm",
    "encoder_attn.q_proj": "cross_attention.query",
    "encoder_attn.k_proj": "cross_attention.key",
    "encoder_attn.v_proj": "cross_attention.value",
    "encoder_attn.out_proj": "cross_attention.output",
    "encoder_attn_layer_norm": "cross_attention_residual.norm",
    "fc1": "feed_forward.up",
    "fc2": "feed_forward.down",
    "final_layer_norm": "feed_forward_residual.norm",  # the last norm of the layer
}
_STACK_PARTS = {
    "embed_positions": "embedding.positions",
    "layernorm_embedding": "embedding.norm",
    "layer_norm": "final_norm",
    **{f"layers.{{layer}}.{theirs}": f"layers.{{layer}}.{ours}" for theirs, ours in _LAYER_PARTS.items()},
}
SOURCE, TARGET = "encoder.embedding.tokens.weight", "decoder.embedding.tokens.weight"
NAMES: NameTable = {
    "model.shared.weight": Copy((SOURCE,), only_without=TARGET),
    "model.encoder.embed_tokens.weight": Copy((SOURCE,), only_with=TARGET),
    "model.decoder.embed_tokens.weight": TARGET,
    **{
        f"model.{stack}.{theirs}.{leaf}": f"{stack}.{ours}.{leaf}"
        for stack in ("encoder", "decoder")
        for theirs, ours in _STACK_PARTS.items()
        for leaf in ("weight", "bias")
    },
    "final_logits_bias": SingleRow(("head.bias",)),
}


def stack_names(prefix: str, encoder_attention: Mapping[str, str], final_norm: str = "layer_norm") -> NameTable:
    """Return the names of a relative whose tensors begin with `prefix`.

    encoder_attention: the names of the encoder's projections after `self_attn.`, and ours.
    """
    parts = {final_norm if theirs == "layer_norm" else theirs: ours for theirs, ours in _STACK_PARTS.items()}
    if final_norm == "layernorm_embedding":  # the name of the norm that is an embedding's elsewhere
        parts["layernorm_embedding"] = "final_norm"
    layer = "layers.{layer}"
    attention = {f"{layer}.self_attn.{a}": f"{layer}.attention.{b}" for a, b in encoder_attention.items()}
    encoder = {theirs: ours for theirs, ours in parts.items() if ".self_attn." not in theirs} | attention
    return {
        f"{prefix}shared.weight": SOURCE,
        **{
            f"{prefix}{stack}.{theirs}.{leaf}": f"{stack}.{ours}.{leaf}"
            for stack, names in (("encoder", encoder), ("decoder", parts))
            for theirs, ours in names.items()
            for leaf in ("weight", "bias")
        },
        "final_logits_bias": SingleRow(("head.bias",)),
    }


DUPLICATES = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}
IGNORED_TENSORS = (
    r"model\.(encoder|decoder)\.embed_positions\.weights?",  # fixed sinusoids, which are computed
    r"model\.(encoder|decoder)\.version",  # version of fairseq's file format
)
