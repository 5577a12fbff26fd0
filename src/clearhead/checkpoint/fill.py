"""A network from foreign tensors, one at a time: every tensor is used once or named as dropped on purpose.

    network = fill(config, tensors, where="model.safetensors", names=family.names, dropped=family.dropped)

The network is laid out without memory first; each foreign tensor is read, split by its row of the table, checked
and put in place, so that the peak is the weights and one tensor more.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError
from clearhead.families import AFTER_LAST, Family, Row, Table, expand, parse_target
from clearhead.model import Transformer
from clearhead.tokenization import Tokenizer

LANGUAGE_HALF = "language_model."  # in every name of a model's language part where another part sees images
Progress = Callable[[str, int, int], None]  # foreign name, how many are done, how many there are


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """All that a checkpoint holds of a model."""

    network: Transformer
    tokenizer: Tokenizer | None = None
    family: Family | None = None
    special_ids: dict[str, Any] = field(default_factory=dict)  # by transformers' names


def fill(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    where: str,
    names: Table | None,
    prefix: str = "",
    older_endings: Mapping[str, str] | None = None,
    copies: Mapping[str, str] | None = None,
    dropped: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """`names` None: the file uses ours. `dtype` None: as stored. The rest is told in families/family.py."""
    num_layers = sum(len(stack.layers) for stack in (config.encoder, config.decoder) if stack is not None)
    if num_layers > len(tensors):  # laid out, a layer takes 50 kB of Python objects
        raise ClearheadError(f"{where} holds {len(tensors)} tensors, too few for the {num_layers} layers of the config")
    network = lay_out(config, where)
    shapes = {name: tensor.shape for name, tensor in slots(network).items()}
    # One row more than the file has tensors is enough to see that some are missing, and bounds the work.
    rows = dict(islice(expand(names or {name: name for name in shapes}, config, set(shapes)), len(tensors) + 1))
    held = by_todays_name(set(tensors), rows, prefix, older_endings or {})
    after_last = str(len(config.output_stack.layers))
    account(rows, held, copies or {}, [pattern.replace(AFTER_LAST, after_last) for pattern in dropped], where)
    placed = Placement(shapes, where, dtype or stored_dtype(rows, held, tensors), device)
    for done, (name, row) in enumerate(rows.items(), 1):
        placed.put(name, row, tensors[held[name]], config)
        if progress is not None:
            progress(name, done, len(rows))
    for name, copy_of in (copies or {}).items():
        if name in held and name not in rows:
            check_copy(name, copy_of, tensors[held[name]], tensors[held[copy_of]], where)
    install(network, placed.finished())
    return network


def lay_out(config: ModelConfig, where: str) -> Transformer:
    try:
        with torch.device("meta"):
            return Transformer(config)
    except RuntimeError as error:  # a product of sizes that no tensor can have
        raise ClearheadError(f"{where}: a model of these sizes cannot be: {error}") from None


def stored_dtype(rows: Mapping[str, Row], held: Mapping[str, str], tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """One for the whole network, that of its token table: norms are often stored more precisely than matrices."""
    table = next((name for name, row in rows.items() if row.own[0].endswith("embedding.tokens.weight")), None)
    return None if table is None else tensors[held[table]].dtype


def slots(network: torch.nn.Module) -> dict[str, Tensor]:
    """Every place that a checkpoint fills: parameters (shared ones once) and the routers' selection bias."""
    return dict(network.named_parameters()) | dict(network.named_buffers())


def by_todays_name(
    stored: set[str], rows: Mapping[str, Row], prefix: str, older_endings: Mapping[str, str]
) -> dict[str, str]:
    """Name in our table -> name in the file. Checkpoints of the bare model leave `prefix` out."""
    held = {}
    for name in stored:
        older = next((ending for ending in older_endings if name.endswith(ending)), "")
        newer = name.replace(LANGUAGE_HALF, "", 1).removesuffix(older) + older_endings.get(older, "")
        held[name if newer in stored else newer] = name  # both spellings in one file: the older has no place
    if prefix and not any(name.startswith(prefix) for name in held):
        bare = {name.removeprefix(prefix) for name in rows if name.startswith(prefix)}
        held = {(prefix + name if name in bare or name not in rows else name): held[name] for name in held}
    return held


def account(
    rows: Mapping[str, Row],
    held: Mapping[str, str],
    copies: Mapping[str, str],
    dropped: Iterable[str],
    where: str,
) -> None:
    """Nothing missing, nothing left over."""
    missing = sorted(set(rows) - set(held))
    if missing:
        raise ClearheadError(f"{where} lacks {listed(missing)}")
    patterns = [re.compile(pattern) for pattern in dropped]
    extra = [
        name
        for name in sorted(set(held) - set(rows))
        if copies.get(name) not in held and not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    if extra:
        raise ClearheadError(f"{where} holds {listed(extra)}, which this model has no place for")


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return (
        f"{len(names)} tensors, the first {shown}" if len(names) > 4 else f"the tensor{'s' * (len(names) > 1)} {shown}"
    )


def check_copy(name: str, copy_of: str, tensor: Tensor, original: Tensor, where: str) -> None:
    if not torch.equal(tensor, original):
        raise ClearheadError(f"{where}: {name} differs from {copy_of}, though the config says the two are one")


class Placement:
    """Our tensors as they fill up."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        where: str,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ):
        self.shapes, self.where, self.dtype, self.device = shapes, where, dtype, device
        self.tensors: dict[str, Tensor] = {}
        self.filled_slices: dict[str, set[int]] = {}

    def put(self, name: str, row: Row, foreign: Tensor, config: ModelConfig) -> None:
        targets = [parse_target(own) for own in row.own]
        shapes = [self.shapes[own][0 if index is None else 1 :] for own, index in targets]
        self.check(name, foreign)
        try:
            parts = row.split(foreign, shapes, config)
        except RuntimeError:  # torch cannot view it as the row says
            raise self.misshapen(name, foreign, shapes) from None
        if [part.shape for part in parts] != shapes:
            raise self.misshapen(name, foreign, shapes)
        for (own, index), part in zip(targets, parts, strict=True):
            self.place(own, index, part)

    def place(self, own: str, index: int | None, part: Tensor) -> None:
        # The bias that decides between experts stays as precise as it is.
        dtype = part.dtype if self.dtype is None or own.endswith("selection_bias") else self.dtype
        if index is None:
            self.tensors[own] = part.to(dtype=dtype, device=self.device).contiguous()
            return
        if own not in self.tensors:
            self.tensors[own] = torch.empty(self.shapes[own], dtype=dtype, device=self.device)
        self.tensors[own][index].copy_(part)
        self.filled_slices.setdefault(own, set()).add(index)

    def check(self, name: str, foreign: Tensor) -> None:
        if not foreign.is_floating_point():
            raise ClearheadError(f"{self.where}: {name} holds {foreign.dtype}, not floating-point numbers")
        if foreign.element_size() == 1:
            raise ClearheadError(f"{self.where}: {name} holds {foreign.dtype} without scales; convert it first")
        if not foreign.numel():
            return
        edges = torch.stack(torch.aminmax(foreign))
        if not edges.isfinite().all():
            raise ClearheadError(f"{self.where}: {name} holds NaN or infinite numbers; the file is damaged")
        if not edges.to(dtype=self.dtype).isfinite().all():
            held = f"numbers from {edges.min():g} to {edges.max():g}"
            raise ClearheadError(f"{self.where}: {name} holds {held}, too large for {self.dtype}; give a wider dtype")

    def misshapen(self, name: str, foreign: Tensor, shapes: list[torch.Size]) -> ClearheadError:
        expected = " + ".join(str(tuple(shape)) for shape in shapes)
        return ClearheadError(f"{self.where}: {name} is {tuple(foreign.shape)}; the config asks for {expected}")

    def finished(self) -> dict[str, Tensor]:
        for own, shape in self.shapes.items():
            complete = own in self.tensors and len(self.filled_slices.get(own, range(shape[0]))) == shape[0]
            assert complete, f"the family's table has no row for {own}"
        return self.tensors


def install(network: Transformer, tensors: Mapping[str, Tensor]) -> None:
    """Put real tensors where the meta ones are; a table shared by two places stays one."""
    for name, tensor in tensors.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = network.get_submodule(owner_name)
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(tensor)
        else:
            owner._buffers[leaf] = tensor
    network.eval()
