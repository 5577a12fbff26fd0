"""Model families: released sizes, config.json in both directions, and the tensor names of checkpoints.

    preset("llama-3.1-8b"); family_of_type("llama").read_config(settings); family_for(config)

This is the only package in which names of models decide anything. docs/add-a-family.md shows how to add one.

    family         Family: everything that one family provides
    tiny           the architecture of a released model at toy size
    settings       Settings: typed access to the values of a config.json
    tensor_rules   how a tensor of a foreign checkpoint holds one or several of ours
    rope           rotary settings in both directions
    gpt_style      parts shared by GPT, BERT, BLOOM, MPT, BART and the Transformer of 2017
    llama_style    parts shared by LLaMA, Qwen, Gemma, DeepSeek, Llama 4 and Grok
    heads          other heads than the language head of decoders
    encoder_style  parts shared by the encoders: heads, BERT's tensor names
    decoders       decoder-only model types that are rows of a table: decoder_rows_* has the rows, decoder_row says
                   what a row means, decoder_reading, decoder_writing and decoder_experts translate it
    gguf           metadata and tensor names of GGUF files
    gguf_architectures  their table: gguf_decoders, gguf_mixtures and gguf_encoders have the rows, gguf_row says what a
                   row means
    gguf_writing   a config as such metadata
    ctranslate2    settings and tensor names of Marian models in CTranslate2's format
    bloom, deepseek, gemma, gopher, gpt, gpt_neo, grok, llama, llama4, mpt, palm, qwen
    bart (with bart_names), bart_long, t5, transformer, whisper
    albert, bert, deberta, distilbert, electra, modernbert, mpnet, nomic, roberta
                   one family or a few close relatives each

Importing this package does not import torch.
"""

from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError, quote, unknown_name
from clearhead.families import (
    albert,
    bart,
    bart_long,
    bert,
    bloom,
    deberta,
    decoders,
    deepseek,
    distilbert,
    electra,
    gemma,
    gopher,
    gpt,
    gpt_neo,
    grok,
    llama,
    llama4,
    modernbert,
    mpnet,
    mpt,
    nomic,
    palm,
    qwen,
    roberta,
    t5,
    transformer,
    whisper,
)
from clearhead.families.ctranslate2 import CTRANSLATE2_MARIAN, marian_config
from clearhead.families.family import Family
from clearhead.families.gguf import gguf_architecture, gguf_settings, to_plain_value
from clearhead.families.gguf_architectures import ARCHITECTURES as GGUF_ARCHITECTURES
from clearhead.families.gguf_row import LONG_FACTORS, ROTARY_DIVISORS, SHORT_FACTORS, GgufArchitecture
from clearhead.families.gguf_writing import gguf_metadata
from clearhead.families.heads import names_with_classifier, replace_head, write_config
from clearhead.families.llama import META_LLAMA_NAMES, llama_config
from clearhead.families.settings import GENERATION_IDS, Settings
from clearhead.families.tensor_rules import (
    NUM_LAYERS_PLACEHOLDER,
    NameTable,
    TensorRule,
    expand_table,
    split_expert_index,
)
from clearhead.families.tiny import TinySizes, shrink
from clearhead.families.transformer import transformer_config

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen.FAMILY,
    gemma.FAMILY,
    deepseek.FAMILY,
    llama4.FAMILY,
    *grok.FAMILIES,
    *gpt.FAMILIES,
    gpt_neo.FAMILY,
    distilbert.FAMILY,  # before BERT, whose class in transformers needs types of tokens
    bert.FAMILY,
    roberta.FAMILY,
    mpnet.FAMILY,
    electra.FAMILY,
    albert.FAMILY,
    modernbert.FAMILY,
    deberta.FAMILY,
    nomic.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    t5.FAMILY,
    bart.FAMILY,
    *bart_long.FAMILIES,
    whisper.FAMILY,
    transformer.FAMILY,
    gopher.FAMILY,
    palm.FAMILY,
    *decoders.FAMILIES,
)


def presets() -> tuple[str, ...]:
    """Return the names of all presets, one for each released model size."""
    return tuple(name for family in FAMILIES for name in family.presets)


def preset(name: str) -> ModelConfig:
    """Return the config of a released model; `presets()` lists the names."""
    for family in FAMILIES:
        if name in family.presets:
            return family.presets[name]()
    raise unknown_name("preset", name, presets(), "`clearhead presets` lists them")


def family_of_type(model_type: str) -> Family:
    """Return the family that reads a config.json with this `model_type`."""
    families = {known_type: family for family in FAMILIES for known_type in family.model_types}
    if model_type not in families:  # a similar name would not help: the type belongs to the model
        raise ClearheadError(
            f"models of type {quote(model_type)} are not supported; docs/models.md lists the {len(families)} that are"
        )
    return families[model_type]


def family_for(config: ModelConfig) -> Family:
    """Return the first family whose config.json can express the whole configuration."""
    for family in FAMILIES:
        if family.write_config is None:
            continue
        try:
            write_config(family, config)
        except ClearheadError:
            continue
        return family
    raise ClearheadError("no Hugging Face model type can express this configuration; save it as native instead")


__all__ = [
    "CTRANSLATE2_MARIAN",
    "FAMILIES",
    "GENERATION_IDS",
    "GGUF_ARCHITECTURES",
    "LONG_FACTORS",
    "META_LLAMA_NAMES",
    "NUM_LAYERS_PLACEHOLDER",
    "ROTARY_DIVISORS",
    "SHORT_FACTORS",
    "Family",
    "GgufArchitecture",
    "NameTable",
    "Settings",
    "TensorRule",
    "TinySizes",
    "expand_table",
    "family_for",
    "family_of_type",
    "gguf_architecture",
    "gguf_metadata",
    "gguf_settings",
    "llama_config",
    "marian_config",
    "names_with_classifier",
    "preset",
    "presets",
    "replace_head",
    "shrink",
    "split_expert_index",
    "to_plain_value",
    "transformer_config",
    "write_config",
]
