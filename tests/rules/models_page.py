"""Write docs/models.md: every model type that we read, its class, what is compared, and whether a fast path runs it.

python -m tests.rules.models_page
"""

import re
import warnings
from pathlib import Path

import transformers

from clearhead.architecture import ModelConfig
from clearhead.backends import unsupported_reason
from clearhead.errors import ClearheadError
from clearhead.families import FAMILIES, GGUF_ARCHITECTURES, Family, Settings
from clearhead.families.decoders import ROWS
from tests.parity.classes import REFUSED_ENDS, further_classes, is_refused
from tests.parity.config_types import TYPES
from tests.parity.registry import OF_DECODERS, OF_ENCODERS, comparisons
from tests.rules.models_size import size_section

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
GGUF_HEAD = """## GGUF files

The architectures of GGUF files that are read and written, as llama.cpp names them. A toy of each is written, its tensor
names are those of the `gguf` package, and with llama-cpp-python installed a slow test compares logits, or the hidden
states of encoders, with llama.cpp. Encoders are written without pooler and language head, and files of rerankers are
refused. A few model types are written as the architecture of another one, which computes the same; a file is then read
as the latter. RoBERTa and its relatives are stored as `bert` without the rows of their position table that no token
uses.

llama.cpp computes a few things otherwise than the released models, and than Clearhead from the same file. It rounds the
bounds of gpt-oss' YaRN ramp, chooses DeepSeek-V2's groups of experts by their two best ones, as V3 does, ignores the
window of `phi3` (also Mistral with a window, and Ministral) and of `starcoder2`, does not multiply the logits of UMT5
and of T5 with a tied head by width^-0.5 (the most likely token is the same), and encodes what a Unigram vocabulary
lacks as the unknown token, also if there are bytes.

Of LongRoPE (Phi-3 and Phi-4), Clearhead takes the long factors if a text has more tokens than the original context, as
transformers does, and llama.cpp if the memory for the context has room for more. A text that grows beyond it is read
again from the start, as Phi-3 is in transformers.

| architecture | model_type |
|---|---|
"""
HEAD = """# Models

Every `model_type` of a Hugging Face config.json that Clearhead reads. `python -m tests.rules.models_page` writes this
page, and a test compares it with the code.

The tests build each class in transformers at toy size, draw all of its weights at random, and compare. "All" stands for

- logits: float32 (within 1e-5, DeepSeek-V2 1.5e-5), with and without padding (on the left, of a source on the right);
- float64: the same within 1e-12 (BLOOM 1e-8, because transformers has a constant of its activation with eight digits);
- saved: every tensor after saving, and the logits of transformers from the saved folder;
- errors: an error in any single field of our config is noticed;
- fields: every field of config.json changed, one at a time, gives transformers' logits or is refused;
- greedy and beams, except for encoders and Whisper, whose transcripts are compared in `tests/transcription`: 40 tokens
  of greedy decoding and the best of 4 beams (12 tokens).

What compares them is found in the code of the tests. Most of them are slow tests.

On real weights, rounding in float32 causes 1e-5 to 1e-3 in logits, in either library. `python benchmarks/precision.py`
measures both against float64: of SmolLM2-135M (logits up to 33), the largest error is 4.8e-5 here and 4.8e-5 in
transformers; of MiniLM (hidden states up to 5.3), 2.4e-6 and 2.4e-6.

Of `Gemma3ForConditionalGeneration`, `Llama4ForConditionalGeneration` and `Mistral3ForConditionalGeneration` the text
part is loaded, and the tensors of `vision_tower`, `vision_model` and `multi_modal_projector` are dropped.

LED is read without its global attention, which transformers uses only if a caller marks tokens, so it is saved in our
own format only. BigBird-Pegasus is read only with `attention_type: original_full`.

"CPU kernels" and "GPU kernels" say whether the [fast path](fast-path.md) computes the class with its usual settings, or
what it does not support; the modules of PyTorch then compute it.

| class | model_type | preset | first case | compared | CPU kernels | GPU kernels |
|---|---|---|---|---|---|---|
"""
FURTHER_HEAD = """## Further classes

Checkpoints without a head load as embedders, and those that classify texts or tokens with their head.
`test_classes.py` compares logits or hidden states of each class in float32 with padding, of encoder-decoders the hidden
states of the encoder. It saves each (but LED) and compares what transformers computes from the saved folder.

| model_type | classes |
|---|---|
"""
REFUSED_HEAD = """
## What does not load and why

Classes that answer questions, choose among answers or judge whether a sentence follows have heads that we do not have.
The same is true of {others}: the first kind is a decoder of an encoder-decoder without its cross-attention; the others
have modules between hidden states and scores that the other classes do not have. An error names the tensors that are
missing or not known.

ProphetNet would need another network. Its decoder carries two kinds of hidden states through all layers: those of the
tokens, which give keys and values, and one per position for each of the next tokens, which starts from a learned vector
in the place of a token. The logits come from the latter, which attend to the keys of the former and to their own key.
A position thus has two queries, of which one leaves nothing in the cache. Its relative positions are a linear function
of the hidden state of each query, in every layer. Neither is a setting of the parts that we have; it would take an
attention, a cache and a decode step of its own for one model type.
"""
# model type without a row in the tables of families/gguf_*.py -> the architecture that it is written as
WRITTEN_AS = {
    "camembert": "bert",
    "distilbert": "bert",
    "helium": "ernie4_5",
    "ministral": "phi3",
    "mistral": "llama",
    "mt5": "t5",
    "roberta": "bert",
    "umt5": "t5",
    "xlm-roberta": "bert",
}
NOT_IN_GGUF_HEAD = """
The other model types cannot be written, because llama.cpp (August 2026) has no network that computes the same:

| model_type | what llama.cpp lacks |
|---|---|
"""
_T5_ONLY = "T5 is its only encoder-decoder"
NOT_IN_GGUF = {
    "albert": "an embedding narrower than the layers, and layers that share their weights",
    "bart": _T5_ONLY,
    "bigbird_pegasus": _T5_ONLY,
    "codegen": "GPT-J's network, which CodeGen has",
    "deberta-v2": "attention to relative positions by content (disentangled attention)",
    "electra": "the discriminator's head, and in the small model an embedding narrower than the layers",
    "gpt_neo": "GPT-2 with windows and unscaled scores",
    "gptj": "a network for the name `gptj`, which it has",
    "led": _T5_ONLY,
    "m2m_100": _T5_ONLY,
    "marian": _T5_ONLY,
    "mbart": _T5_ONLY,
    "mpnet": "BERT with relative positions",
    "openai-gpt": "GPT-2 with norms after each branch",
    "opt": "GPT-2 with ReLU",
    "pegasus": _T5_ONLY,
    "whisper": "audio; whisper.cpp has a file format of its own",
    "xglm": "sinusoidal positions",
}


def page() -> str:
    """Return the text of docs/models.md."""
    rows = [row for family in FAMILIES for model_type in family.model_types for row in table_rows(family, model_type)]
    return (
        HEAD
        + "\n".join(sorted(rows, key=str.lower))
        + "\n\n"
        + further_table()
        + "\n"
        + gguf_table()
        + "\n"
        + size_section()
    )


def gguf_table() -> str:
    """Return the section that lists the architectures of GGUF files, and why some model types have none."""
    pairs = {(row.stored_name or name, row.model_type) for name, row in GGUF_ARCHITECTURES.items()}
    pairs |= {(name, model_type) for model_type, name in WRITTEN_AS.items()}
    reasons = "".join(f"| `{model_type}` | {reason} |\n" for model_type, reason in sorted(NOT_IN_GGUF.items()))
    table = "".join(f"| `{name}` | `{model_type}` |\n" for name, model_type in sorted(pairs))
    return GGUF_HEAD + table + NOT_IN_GGUF_HEAD + reasons


def further_table() -> str:
    """Return the section that lists the classes besides the main ones, and those that are refused."""
    rows, refused = [], []
    for model_type in sorted(TYPES, key=str.lower):
        names = further_classes(model_type)
        read = [name for name in names if not is_refused(name)]
        refused += [name for name in names if is_refused(name)]
        rows.append(f"| `{model_type}` | {', '.join(f'`{name}`' for name in read)} |\n")
    others = sorted(name for name in refused if not name.endswith(REFUSED_ENDS))
    return FURTHER_HEAD + "".join(rows) + REFUSED_HEAD.format(others=", ".join(f"`{name}`" for name in others))


def table_rows(family: Family, model_type: str) -> list[str]:
    """Return the row of one model type."""
    preset, config = example(family, model_type)
    cells = [
        f"`{class_name(family, model_type)}`",
        f"`{model_type}`",
        f"`{preset}`" if preset else "",
        *comparison_of(class_name(family, model_type), config),
        *(support(config, backend) for backend in ("cpu", "paged")),
    ]
    return [f"| {' | '.join(cells)} |"]


def example(family: Family, model_type: str) -> tuple[str | None, ModelConfig]:
    """Return the first preset of this model type and its config; without one, transformers' defaults."""
    assert family.read_config is not None
    assert family.write_config is not None
    for name, make_config in family.presets.items():
        try:
            if family.write_config(make_config())["model_type"] == model_type:
                return name, make_config()
        except ClearheadError:
            continue
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = transformers.AutoConfig.for_model(model_type, pad_token_id=0).to_dict()
    return None, family.read_config(Settings(data | {"num_experts_per_tok": 2}, model_type))


def class_name(family: Family, model_type: str) -> str:
    """Return the class in transformers that a config of this type is saved for."""
    rows = {row.model_type: row.architecture for row in ROWS}
    if model_type in rows:
        return rows[model_type]
    _, config = example(family, model_type)
    kind = "SEQ_TO_SEQ_CAUSAL_LM" if config.is_encoder_decoder else "CAUSAL_LM" if config.decoder else "MASKED_LM"
    kind = "SPEECH_SEQ_2_SEQ" if config.reads_audio else kind
    mappings = transformers.models.auto.modeling_auto
    names = getattr(mappings, f"MODEL_FOR_{kind}_MAPPING_NAMES")
    return str(names.get(model_type) or mappings.MODEL_MAPPING_NAMES[model_type])


def comparison_of(name: str, config: ModelConfig) -> tuple[str, str]:
    """Return the first parity case of a class, and what the tests compare of it."""
    found = comparisons()[name]
    required = OF_ENCODERS if config.decoder is None else OF_DECODERS
    missing = sorted(required - found.checks)
    compared = "all" if not missing else f"all but {', '.join(missing)}"
    return f"`{found.case}` in `{found.file}`", compared


def support(config: ModelConfig, backend: str) -> str:
    """Return "yes", or what a backend does not support."""
    reason = unsupported_reason(config, backend)  # type: ignore[arg-type]
    return "yes" if reason is None else re.sub(" (is|are) not supported$", "", reason)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
