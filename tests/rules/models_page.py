"""Write docs/models.md: every model type that we read, its class, where it is checked, and whether a fast path runs it.

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

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
SOURCE = ROOT / "src" / "clearhead" / "families"
SIZE_HEAD = """## The size of a family

Lines of code for each model type: names of tensors, config.json in both directions, presets, comments and docstrings. A
row of a table is data alone. Code that all of a kind share is not counted: `decoder_row.py`, `decoder_reading.py`,
`decoder_writing.py` and `decoder_experts.py` for rows, `encoder_style.py` for encoders.

| | model types | lines | lines for each |
|---|---|---|---|
"""
GGUF_HEAD = """## GGUF files

The architectures of GGUF files that are read and written, as llama.cpp names them. A toy of each is written, its tensor
names are those of the `gguf` package, and with llama-cpp-python installed a slow test compares logits, or the hidden
states of encoders, with llama.cpp. RoBERTa and XLM-R are stored as `bert`; files of rerankers are refused, and encoders
are written without pooler and language head.

llama.cpp computes two things otherwise than the released models, and than Clearhead from the same file: it rounds the
bounds of gpt-oss' YaRN ramp, and it chooses DeepSeek-V2's groups of experts by their two best ones, as V3 does.

| architecture | model_type |
|---|---|
"""
HEAD = """# Models

Every `model_type` of a Hugging Face config.json that Clearhead reads. `python -m tests.rules.models_page` writes this
page, and a test compares it with the code.

The tests build each class in transformers at toy size, draw all of its weights at random, and compare: logits in
float32 (within 1e-5) and float64 (1e-12) with padding, the tokens of greedy decoding, and every tensor after saving and
loading. Slow tests also change every field of config.json, one at a time: transformers' logits are matched, or loading
is refused with the reason.

On real weights, rounding in float32 causes 1e-5 to 1e-3 in logits, in either library. `python benchmarks/precision.py`
measures both against float64: of SmolLM2-135M (logits up to 33), the largest error is 4.8e-5 here and 4.8e-5 in
transformers; of MiniLM (hidden states up to 5.3), 2.4e-6 and 2.4e-6.

Of `Gemma3ForConditionalGeneration`, `Llama4ForConditionalGeneration` and `Mistral3ForConditionalGeneration` the text
part is loaded, and the tensors of `vision_tower`, `vision_model` and `multi_modal_projector` are dropped.

LED is read without its global attention, which transformers uses only if a caller marks tokens, and BigBird-Pegasus
only with `attention_type: original_full`.

"CPU kernels" and "GPU kernels" say whether the [fast path](fast-path.md) computes the class with its usual settings, or
what it does not support; the modules of PyTorch then compute it.

| class | model_type | preset | checked in | CPU kernels | GPU kernels |
|---|---|---|---|---|---|
"""


# What was added to support model types: files of clearhead/families, and how many model types they describe
GROUPS = {
    "decoders that are rows of a table": ("decoder_rows_*.py", len(ROWS)),
    "encoders": (
        "albert.py bert.py deberta.py distilbert.py electra.py modernbert.py mpnet.py nomic.py roberta.py",
        ("albert", "bert", "deberta", "distilbert", "electra", "modernbert", "mpnet", "nomic", "roberta"),
    ),
    "encoder-decoders": ("bart.py bart_names.py bart_long.py t5.py", ("bart", "bigbird-pegasus", "led", "t5")),
}


def page() -> str:
    """Return the text of docs/models.md."""
    rows = [row for family in FAMILIES for model_type in family.model_types for row in table_rows(family, model_type)]
    return HEAD + "\n".join(sorted(rows, key=str.lower)) + "\n\n" + gguf_table() + "\n" + size_table()


def gguf_table() -> str:
    """Return the section that lists the architectures of GGUF files."""
    pairs = sorted((row.stored_name or name, row.model_type) for name, row in GGUF_ARCHITECTURES.items())
    return GGUF_HEAD + "".join(f"| `{name}` | `{model_type}` |\n" for name, model_type in pairs)


def size_table() -> str:
    """Return the section that counts the lines of code for each model type."""
    lines = [SIZE_HEAD.rstrip("\n")]
    for name, (patterns, families) in GROUPS.items():
        count = families if isinstance(families, int) else number_of_types(families)
        paths = [path for pattern in patterns.split() for path in sorted(SOURCE.glob(pattern))]
        num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        lines.append(f"| {name} | {count} | {num_lines:,} | {num_lines / count:.0f} |")
    return "\n".join(lines) + "\n"


def number_of_types(names: tuple[str, ...]) -> int:
    """Return how many model types these families read."""
    return sum(len(family.model_types) for family in FAMILIES if family.name in names)


def table_rows(family: Family, model_type: str) -> list[str]:
    """Return the row of one model type."""
    preset, config = example(family, model_type)
    cells = [
        f"`{class_name(family, model_type)}`",
        f"`{model_type}`",
        f"`{preset}`" if preset else "",
        f"`{test_file(class_name(family, model_type))}`",
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


def test_file(name: str) -> str:
    """Return the parity test that names a class, or else its model."""
    if name in {row.architecture for row in ROWS}:
        return "test_decoders.py"
    folder = ROOT / "tests" / "parity"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("test_*.py"))}
    bare = re.sub("(For[A-Z]|LMHead|MTModel).*", "", name)
    patterns = (rf"\b{name}\b", rf"\b{bare}(Config|Model|For\w+)\b")
    found = [file for pattern in patterns for file, text in texts.items() if re.search(pattern, text)]
    return next((file for file in found if file not in ("test_spellings.py", "test_config_fields.py")), "—")


def support(config: ModelConfig, backend: str) -> str:
    """Return "yes", or what a backend does not support."""
    reason = unsupported_reason(config, backend)  # type: ignore[arg-type]
    return "yes" if reason is None else re.sub(" (is|are) not supported$", "", reason)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
