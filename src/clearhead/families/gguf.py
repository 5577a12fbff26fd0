"""GGUF files in the families' words: their keys become transformers' settings, their names become ours.

    settings = settings_from(metadata, shapes, where="model.gguf"); names = ARCHITECTURES["llama"].names

The keys are llama.cpp's (`gguf` package, constants.py). Its converter turns the rotary rows of the `llama`
architecture back to neighbours, adds 1 to Gemma's norm weights, and transposes GPT-2's matrices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.architecture import Llama3Scaling
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families.names import LAYER, QKV_BIASES, QKV_WEIGHTS, Fused, Interleaved, PlusOne, Row, Table
from clearhead.families.settings import Settings
from clearhead.model import llama3_frequencies

# GGUF key after "<architecture>." -> transformers' setting
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# Keys that change what is computed and that none of these architectures has, with the values that change nothing
REFUSED: dict[str, tuple[Any, ...]] = {
    "logit_scale": (1.0,),
    "attention.scale": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "use_parallel_residual": (False,),
    "final_logit_softcapping": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "rope.scaling.attn_factor": (1.0,),
}
GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
PROJECTIONS = {
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
    "ffn_gate": "feed_forward.gate",
    "ffn_up": "feed_forward.up",
    "ffn_down": "feed_forward.down",
}


def projections(query_and_key: Callable[[tuple[str, ...]], Row] | None = None) -> Table:
    """The rows common to all with separate query, key and value."""
    table: dict[str, str | Row] = {
        "token_embd.weight": "decoder.embedding.tokens.weight",
        "blk.{layer}.attn_norm.weight": f"{LAYER}.attention_residual.norm.weight",
        "blk.{layer}.ffn_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
        "output_norm.weight": "decoder.final_norm.weight",
        "output.weight": "head.weight",
    }
    for theirs, ours in PROJECTIONS.items():
        for part in ("weight", "bias"):
            own = f"{LAYER}.{ours}.{part}"
            turned = query_and_key if theirs in ("attn_q", "attn_k") else None
            table[f"blk.{{layer}}.{theirs}.{part}"] = turned((own,)) if turned else own
    return table


HEAD_NORMS: Table = {
    "blk.{layer}.attn_q_norm.weight": f"{LAYER}.attention.query_norm.weight",
    "blk.{layer}.attn_k_norm.weight": f"{LAYER}.attention.key_norm.weight",
}
GEMMA_NORMS: Table = {
    "blk.{layer}.attn_norm.weight": PlusOne((f"{LAYER}.attention_residual.norm.weight",)),
    "blk.{layer}.post_attention_norm.weight": PlusOne((f"{LAYER}.attention_residual.branch_norm.weight",)),
    "blk.{layer}.ffn_norm.weight": PlusOne((f"{LAYER}.feed_forward_residual.norm.weight",)),
    "blk.{layer}.post_ffw_norm.weight": PlusOne((f"{LAYER}.feed_forward_residual.branch_norm.weight",)),
    "blk.{layer}.attn_q_norm.weight": PlusOne((f"{LAYER}.attention.query_norm.weight",)),
    "blk.{layer}.attn_k_norm.weight": PlusOne((f"{LAYER}.attention.key_norm.weight",)),
    "output_norm.weight": PlusOne(("decoder.final_norm.weight",)),
}
GPT2_NAMES: Table = {
    "token_embd.weight": "decoder.embedding.tokens.weight",
    "position_embd.weight": "decoder.embedding.positions.weight",
    "blk.{layer}.attn_norm.weight": f"{LAYER}.attention_residual.norm.weight",
    "blk.{layer}.attn_norm.bias": f"{LAYER}.attention_residual.norm.bias",
    "blk.{layer}.attn_qkv.weight": Fused(QKV_WEIGHTS),
    "blk.{layer}.attn_qkv.bias": Fused(QKV_BIASES),
    "blk.{layer}.attn_output.weight": f"{LAYER}.attention.output.weight",
    "blk.{layer}.attn_output.bias": f"{LAYER}.attention.output.bias",
    "blk.{layer}.ffn_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "blk.{layer}.ffn_norm.bias": f"{LAYER}.feed_forward_residual.norm.bias",
    "blk.{layer}.ffn_up.weight": f"{LAYER}.feed_forward.up.weight",
    "blk.{layer}.ffn_up.bias": f"{LAYER}.feed_forward.up.bias",
    "blk.{layer}.ffn_down.weight": f"{LAYER}.feed_forward.down.weight",
    "blk.{layer}.ffn_down.bias": f"{LAYER}.feed_forward.down.bias",
    "output_norm.weight": "decoder.final_norm.weight",
    "output_norm.bias": "decoder.final_norm.bias",
    "output.weight": "head.weight",  # some converters write the token table twice
}


@dataclass(frozen=True)
class Architecture:
    model_type: str  # of transformers, for families.family_of_type
    names: Table
    keys: Mapping[str, str]


ARCHITECTURES = {
    "llama": Architecture("llama", projections(Interleaved), KEYS),
    "qwen2": Architecture("qwen2", projections(), KEYS),
    "qwen3": Architecture("qwen3", {**projections(), **HEAD_NORMS}, KEYS),
    "gemma3": Architecture("gemma3_text", {**projections(), **GEMMA_NORMS}, KEYS),
    "gpt2": Architecture("gpt2", GPT2_NAMES, GPT2_KEYS),
}
# llama3 scaling travels as a tensor of divisors; see llama3_scaling
DROPPED = (r"rope_freqs\.weight",)


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise unknown_name("GGUF architecture", name, ARCHITECTURES)
    return ARCHITECTURES[name]


def settings_from(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> Settings:
    """What transformers' config.json of the same model would say; `shapes` of the stored tensors."""
    architecture, prefix = architecture_of(metadata), f"{metadata['general.architecture']}."
    own = (prefix, "split.")  # not the vocabulary, which may be long
    stored = Settings({key: as_list(value) for key, value in metadata.items() if key.startswith(own)}, where)
    if stored.whole("split.count", 1) > 1:
        raise ClearheadError(f"{where} is one part of a split model; join its parts first (llama-gguf-split --merge)")
    data: dict[str, Any] = {
        setting: stored.data[prefix + key] for key, setting in architecture.keys.items() if prefix + key in stored
    }
    for key, harmless in REFUSED.items():
        stored.refuse(prefix + key, *harmless)
    rotated, head = stored.data.get(prefix + "rope.dimension_count"), head_width_of(data)
    if rotated is not None and head is not None and rotated != head:
        raise ClearheadError(f"{where}: {rotated} of {head} entries of a head are rotated, which is not computed here")
    if architecture.model_type == "llama":
        stored.refuse(prefix + "attention.sliding_window", 0)
    vocab_size, *_ = shapes.get("token_embd.weight", (None,))
    data |= {"model_type": architecture.model_type, "vocab_size": vocab_size}
    data["tie_word_embeddings"] = "output.weight" not in shapes
    data["attention_bias"] = "blk.0.attn_output.bias" in shapes
    data["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    data["rope_scaling"] = rope_scaling(stored, prefix + "rope.")
    if architecture.model_type == "gemma3_text":
        data |= gemma3_settings(data)
    return Settings(data, where)


def as_list(value: Any) -> Any:
    """Arrays of numbers as lists, which can be compared with a number."""
    if isinstance(value, list):
        return [as_list(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def rope_scaling(stored: Settings, prefix: str) -> dict[str, Any]:
    """As llama.cpp reads it: a factor alone, which once had another name, is linear; without one nothing is scaled."""
    factor = stored.data.get(prefix + "scaling.factor", stored.data.get(prefix + "scale_linear"))
    kind = stored.text(prefix + "scaling.type", "linear")
    if factor is None or kind == "none":
        return {}
    original = stored.data.get(prefix + "scaling.original_context_length")
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def head_width_of(data: Mapping[str, Any]) -> int | None:
    """As stored, or width / heads."""
    width, heads = data.get("hidden_size"), data.get("num_attention_heads")
    if "head_dim" in data or not isinstance(width, int) or not isinstance(heads, int) or heads < 1:
        return data.get("head_dim")
    return width // heads


def gemma3_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 by heart: the 27B's width / heads as score scale."""
    by_width = head_width_of({key: value for key, value in data.items() if key != "head_dim"})
    return {"query_pre_attn_scalar": by_width if data.get("num_hidden_layers") == 62 else data.get("head_dim")}


def llama3_scaling(divisors: Any, theta: float) -> Llama3Scaling | None:
    """The scaling that a `rope_freqs` tensor spells out; None where it is not Llama 3's."""
    exponents = 2 * divisors.new_tensor(range(len(divisors))) / (2 * len(divisors))
    frequencies = 1 / theta**exponents
    scaling = Llama3Scaling(
        factor=float(divisors.max()), low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192
    )
    spelled = frequencies / llama3_frequencies(frequencies, scaling)
    return scaling if ((spelled - divisors).abs() <= 1e-3 * divisors).all() else None
