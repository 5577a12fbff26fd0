"""Who the models are: the only room where their names occur.

    preset("llama-3.1-8b"); family_of_type("llama").read(settings); family_for(config)

One file per family; `names`, `settings`, `rope`, `plain` and `trunk` are what several share.
"""

from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import (
    bart,
    bert,
    bloom,
    deepseek,
    gemma,
    gopher,
    gpt,
    gpt_neo,
    grok,
    llama,
    llama4,
    mpt,
    palm,
    qwen,
    t5,
    transformer,
)
from clearhead.families.family import Family
from clearhead.families.names import (
    AFTER_LAST,
    Row,
    Table,
    expand,
    parse_target,
)
from clearhead.families.settings import (
    Settings,
)

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen.FAMILY,
    gemma.FAMILY,
    deepseek.FAMILY,
    llama4.FAMILY,
    *grok.FAMILIES,
    *gpt.FAMILIES,
    gpt_neo.FAMILY,
    bert.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    t5.FAMILY,
    bart.FAMILY,
    transformer.FAMILY,
    gopher.FAMILY,
    palm.FAMILY,
)


def presets() -> tuple[str, ...]:
    """The names of all released sizes."""
    return tuple(name for family in FAMILIES for name in family.presets)


def preset(name: str) -> ModelConfig:
    """The configuration of a released model."""
    for family in FAMILIES:
        if name in family.presets:
            return family.presets[name]()
    raise unknown_name("preset", name, presets(), "`clearhead presets` lists them")


def family_of_type(model_type: str) -> Family:
    """The family that reads a config.json with this `model_type`."""
    types = {kind: family for family in FAMILIES for kind in family.model_types}
    if model_type not in types:
        raise unknown_name("model_type", model_type, types)
    return types[model_type]


def family_for(config: ModelConfig) -> Family:
    """The first family whose config.json can say all of this config."""
    for family in FAMILIES:
        if family.write is None:
            continue
        try:
            family.write(config)
        except ClearheadError:
            continue
        return family
    raise ClearheadError("no family of Hugging Face models computes this configuration; save it as native instead")


__all__ = [
    "AFTER_LAST",
    "FAMILIES",
    "Family",
    "Row",
    "Settings",
    "Table",
    "bart",
    "ctranslate2",
    "expand",
    "family_for",
    "family_of_type",
    "gguf",
    "llama",
    "parse_target",
    "preset",
    "presets",
    "transformer",
]
