"""Successors of GPT-2 as rows of the decoder table: GPT-NeoX (Pythia), GPT-J, CodeGen, GPT-BigCode (StarCoder).

Sources: Black et al. 2022 and Biderman et al. 2023; Wang & Komatsuzaki 2021; Nijkamp et al. 2022; Li et al. 2023;
transformers' classes, and the config.json of the releases that the presets name.
"""

from typing import Any

from clearhead.architecture import LearnedPositions
from clearhead.errors import ClearheadError
from clearhead.families.decoder_row import DecoderRow, Rotary, Setting, choice, gelu_new, layer_norm
from clearhead.families.gpt_style import TOKEN_CLASSIFIER_NAMES
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import (
    LAYER,
    QKV_BIASES,
    QKV_WEIGHTS,
    FusedInBlocks,
    FusedPerGroup,
    FusedPerHead,
    NameTable,
    with_biases,
)

_GPT_SIZES: dict[str, Any] = {
    "width": Setting("n_embd"),
    "num_layers": Setting("n_layer"),
    "num_heads": Setting("n_head"),
    "context": Setting("n_positions", 2048),
    "feed_forward": Setting("n_inner", None),
    "epsilon": Setting("layer_norm_epsilon", 1e-5),
    "head_width": None,
    "norm": layer_norm,
    "gated": False,
    "feed_forward_bias": True,
    "base_model_prefix": "transformer.",
    "token_table": "transformer.wte.weight",
}
_NEOX = "gpt_neox.layers.{layer}"
GPT_NEOX = DecoderRow(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    epsilon=Setting("layer_norm_eps", 1e-5),
    norm=layer_norm,
    placement=choice("use_parallel_residual", True, {True: "parallel_norms", False: "pre"}),
    num_kv_heads=None,
    head_width=None,
    rotary=Rotary(theta_name="rotary_emb_base", partial=0.25, partial_name="rotary_pct"),
    input_bias=Setting("attention_bias", True),
    output_bias=Setting("attention_bias", True),
    activation=Setting("hidden_act", "gelu"),
    gated=False,
    feed_forward_bias=True,
    base_model_prefix="gpt_neox.",
    token_table="gpt_neox.embed_in.weight",
    head_matrix="embed_out.weight",
    refused={"head_dim": ()},  # transformers uses it for the rotation only
    ignored_tensors=(r".*\.attention\.(masked_)?bias",),  # the causal mask and its fill value
    tensor_names={
        "gpt_neox.embed_in.weight": "decoder.embedding.tokens.weight",
        f"{_NEOX}.attention.query_key_value.weight": FusedPerHead(QKV_WEIGHTS),
        f"{_NEOX}.attention.query_key_value.bias": FusedPerHead(QKV_BIASES),
        **with_biases(
            {
                f"{_NEOX}.attention.dense": f"{LAYER}.attention.output",
                f"{_NEOX}.mlp.dense_h_to_4h": f"{LAYER}.feed_forward.up",
                f"{_NEOX}.mlp.dense_4h_to_h": f"{LAYER}.feed_forward.down",
                f"{_NEOX}.input_layernorm": f"{LAYER}.attention_residual.norm",
                f"{_NEOX}.post_attention_layernorm": f"{LAYER}.feed_forward_residual.norm",
                "gpt_neox.final_layer_norm": "decoder.final_norm",
            }
        ),
        "embed_out.weight": "head.weight",
        **TOKEN_CLASSIFIER_NAMES,
    },
    presets={
        "pythia-160m": {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 50304,
        }
    },
)

_BLOCK = "transformer.h.{layer}"
_GPTJ_NAMES: NameTable = {
    "transformer.wte.weight": "decoder.embedding.tokens.weight",
    f"{_BLOCK}.attn.out_proj.weight": f"{LAYER}.attention.output.weight",
    **with_biases(
        {
            f"{_BLOCK}.mlp.fc_in": f"{LAYER}.feed_forward.up",
            f"{_BLOCK}.mlp.fc_out": f"{LAYER}.feed_forward.down",
            f"{_BLOCK}.ln_1": f"{LAYER}.attention_residual.norm",
            "transformer.ln_f": "decoder.final_norm",
            "lm_head": "head",
        }
    ),
}
_GPTJ: dict[str, Any] = {
    **_GPT_SIZES,
    "placement": "parallel",
    "num_kv_heads": None,
    "rotary": Rotary(pairing="interleaved", width=Setting("rotary_dim", 64)),
    "input_bias": False,
    "output_bias": False,
    "activation": gelu_new("activation_function"),
    "head_bias": True,
    "ignored_tensors": (r".*\.attn\.(masked_bias|bias|causal_mask|embed_positions)",),  # computed from the config
}
GPT_J = DecoderRow(
    **_GPTJ,
    model_type="gptj",
    architecture="GPTJForCausalLM",
    tensor_names={
        **_GPTJ_NAMES,
        f"{_BLOCK}.attn.q_proj.weight": f"{LAYER}.attention.query.weight",
        f"{_BLOCK}.attn.k_proj.weight": f"{LAYER}.attention.key.weight",
        f"{_BLOCK}.attn.v_proj.weight": f"{LAYER}.attention.value.weight",
    },
    presets={"gpt-j-6b": {"n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400}},
)
_QUERY, _KEY, _VALUE = QKV_WEIGHTS
CODEGEN = DecoderRow(
    **_GPTJ,
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    # four blocks, for the four chips on which it was trained
    tensor_names={**_GPTJ_NAMES, f"{_BLOCK}.attn.qkv_proj.weight": FusedInBlocks((_QUERY, _VALUE, _KEY), num_blocks=4)},
    presets={
        "codegen-350m": {"n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim": 32, "vocab_size": 51200},
    },
)


# --- GPT-BigCode (SantaCoder, StarCoder)


def _prepare_bigcode(settings: Settings) -> Settings:
    """Return the settings with the number of key-value heads instead of `multi_query`."""
    num_kv_heads = 1 if settings.boolean("multi_query", True) else settings.data.get("n_head")
    return Settings({**settings.data, "num_key_value_heads": num_kv_heads}, settings.where)


def _finish_bigcode(data: dict[str, Any]) -> dict[str, Any]:
    num_kv_heads = data.pop("num_key_value_heads")
    if num_kv_heads not in (1, data["n_head"]):
        raise ClearheadError(f"a config.json of type 'gpt_bigcode' cannot express {num_kv_heads} key-value heads")
    return data | {"multi_query": num_kv_heads == 1}


GPT_BIGCODE = DecoderRow(
    **_GPT_SIZES | {"context": Setting("n_positions", 1024)},
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    positions=lambda context: LearnedPositions(num_positions=context),
    rotary=None,
    input_bias=True,
    output_bias=True,
    score_scale=Setting(
        "scale_attn_weights", True, lambda scaled: None if scaled else 1.0, lambda scale: scale is None, "boolean"
    ),
    activation=Setting("activation_function", "gelu_pytorch_tanh"),
    tied=Setting("tie_word_embeddings", True),
    refused={"add_cross_attention": (False,)},
    prepare=_prepare_bigcode,
    finish=_finish_bigcode,
    ignored_tensors=(r".*\.attn\.bias",),  # the causal mask
    tensor_names={
        "transformer.wte.weight": "decoder.embedding.tokens.weight",
        "transformer.wpe.weight": "decoder.embedding.positions.weight",
        f"{_BLOCK}.attn.c_attn.weight": FusedPerGroup(QKV_WEIGHTS),
        f"{_BLOCK}.attn.c_attn.bias": FusedPerGroup(QKV_BIASES),
        **with_biases(
            {
                f"{_BLOCK}.attn.c_proj": f"{LAYER}.attention.output",
                f"{_BLOCK}.mlp.c_fc": f"{LAYER}.feed_forward.up",
                f"{_BLOCK}.mlp.c_proj": f"{LAYER}.feed_forward.down",
                f"{_BLOCK}.ln_1": f"{LAYER}.attention_residual.norm",
                f"{_BLOCK}.ln_2": f"{LAYER}.feed_forward_residual.norm",
                "transformer.ln_f": "decoder.final_norm",
            }
        ),
        "lm_head.weight": "head.weight",
        **TOKEN_CLASSIFIER_NAMES,
    },
    presets={
        "starcoder-15b": {
            "n_embd": 6144,
            "n_layer": 40,
            "n_head": 48,
            "n_inner": 24576,
            "n_positions": 8192,
            "vocab_size": 49152,
        }
    },
)

ROWS = (GPT_NEOX, GPT_J, CODEGEN, GPT_BIGCODE)
