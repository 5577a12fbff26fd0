"""Count what a model type takes: lines in families/, its names elsewhere, and parts of the network for it alone.

print(size_section())
"""

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import transformers

from clearhead.families import FAMILIES, Settings, family_of_type
from clearhead.families.decoders import ROWS
from tests.parity.config_types import TYPES

SOURCE = Path(__file__).parents[2] / "src" / "clearhead"
HEAD = """## The size of a family

Lines of code for each model type: names of tensors, config.json in both directions, presets, comments and docstrings. A
row of a table is data alone. Code that all of a kind share is not counted: `decoder_row.py`, `decoder_reading.py`,
`decoder_writing.py` and `decoder_experts.py` for rows, `encoder_style.py` for encoders.

| | model types | lines | lines for each |
|---|---|---|---|
"""
ELSEWHERE = """
What a model type needs outside `families/`:

- Its name, as a string: {strings}.
  These are names in files (`checkpoint` and `tokenization`: Marian in CTranslate2, Llama in llama2.c, the files of
  sentence-transformers, vocabularies and pre-tokenization rules), the models that examples show (`course`, `studies`),
  and the Greek letter. None of them decides how a network computes.
- A part of the network that no other model type uses with the settings of its toy or a preset: a class of
  `architecture`, a choice of one, or a switch. {num_own} of {num_types} model types have such a part; the other
  {num_without} are settings of parts that several types share.

| model type | parts for it alone |
|---|---|
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


def size_section() -> str:
    """Return the section that counts the lines of code for each model type, and what they need elsewhere."""
    lines = [HEAD.rstrip("\n")]
    for name, (patterns, families) in GROUPS.items():
        count = families if isinstance(families, int) else number_of_types(families)
        paths = [path for pattern in patterns.split() for path in sorted((SOURCE / "families").glob(pattern))]
        num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        lines.append(f"| {name} | {count} | {num_lines:,} | {num_lines / count:.0f} |")
    own = own_parts()
    by_package = names_elsewhere()
    strings = ", ".join(f"{len(found)} in `{package}`" for package, found in sorted(by_package.items())) or "none"
    rows = [f"| `{model_type}` | {', '.join(f'`{part}`' for part in parts)} |" for model_type, parts in own.items()]
    counts = {"num_own": len(own), "num_types": len(TYPES), "num_without": len(TYPES) - len(own)}
    elsewhere = ELSEWHERE.format(strings=strings, **counts)
    return "\n".join(lines) + "\n" + elsewhere + "\n".join(rows) + "\n"


def number_of_types(names: tuple[str, ...]) -> int:
    """Return how many model types these families read."""
    return sum(len(family.model_types) for family in FAMILIES if family.name in names)


@cache
def names_elsewhere() -> dict[str, list[tuple[str, str]]]:
    """Return (file, string) of the strings outside families/ that are a model type or a class, by package."""
    names = {model_type for family in FAMILIES for model_type in family.model_types}
    names |= {class_name for class_name, _ in TYPES.values()}
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0]
        if package != "families":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and node.value in names:
                    found[package].append((path.name, node.value))
    return dict(found)


@cache
def own_parts() -> dict[str, list[str]]:
    """Return the parts of the network that only one model type uses, by its name."""
    users: dict[str, set[str]] = defaultdict(set)
    for model_type in TYPES:
        for config in configs_of(model_type):
            for part in parts_of(config):
                users[part].add(model_type)
    found: dict[str, list[str]] = defaultdict(list)
    for part in sorted(users):
        if len(users[part]) == 1:
            found[next(iter(users[part]))].append(part)
    return dict(sorted(found.items()))


def configs_of(model_type: str) -> Iterator[Any]:
    """Yield our config of transformers' toy, and the presets of this type."""
    family = family_of_type(model_type)
    assert family.read_config is not None
    assert family.write_config is not None
    settings = {name: value for name, value in TYPES[model_type][1].items() if name != "attn_implementation"}
    data = transformers.AutoConfig.for_model(model_type, **settings).to_dict()
    yield family.read_config(Settings(data, model_type))
    for make_config in family.presets.values():
        config = make_config()
        try:
            written = family.write_config(config)
        except ValueError:  # another type of the family, or none
            continue
        if written.get("model_type") == model_type:
            yield config


def parts_of(config: Any) -> Iterator[str]:
    """Yield the classes of a config, its choices that are names, and its switches that are on."""
    if isinstance(config, tuple):
        for entry in config:
            yield from parts_of(entry)
    if not dataclasses.is_dataclass(config):
        return
    kind = type(config).__name__
    yield kind
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is True and field.default is False:
            yield f"{kind}.{field.name}"
        elif isinstance(value, str) and re.fullmatch(r"[a-z_]+", value):
            yield f"{kind}.{field.name} = {value}"
        elif isinstance(value, int | float) and isinstance(field.default, float) and value != field.default:
            yield f"{kind}.{field.name}"
        yield from parts_of(value)
