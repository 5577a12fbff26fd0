"""A network as a graph of operations: for torch.export, and as an ONNX file for onnxruntime and other engines.

    program = export_network(network); program.module()(input_ids, attention_mask)
    save_onnx(network, Path("model.onnx"))

The graph reads whole texts and has no cache. Batch size and lengths may vary. Inputs have the names of other exporters:
input_ids, attention_mask, token_type_ids and, for an encoder-decoder, decoder_input_ids, all int64 (B, T).
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from clearhead.backends import is_packed
from clearhead.errors import ClearheadError, shorten
from clearhead.model import AttentionKernel, Transformer, fused_attention, reference_attention

_LOGGERS = ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir")
_OPSET = 20  # the first with GELU as one operation
_EXAMPLE = (2, 7)  # batch and length of the inputs that are traced; neither may be 1, which would be taken as fixed
_MAX_FILE_BYTES = 2**31 - 2**20  # one ONNX file is at most 2 GiB


class _Reader(nn.Module):
    """A decoder or an encoder with the names of inputs that other exporters use."""

    def __init__(self, network: Transformer, kernel: AttentionKernel):
        super().__init__()
        self.network, self.kernel = network, kernel

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the output of the network for whole texts."""
        types = {} if token_type_ids is None else {"token_types": token_type_ids}
        output: Tensor = self.network(input_ids, attention_mask, kernel=self.kernel, **types)
        return output


class _Translator(_Reader):
    """An encoder-decoder; the arguments are those of the same names in transformers."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:  # type: ignore[override]
        """Return the logits of the decoder's tokens."""
        output: Tensor = self.network(input_ids, decoder_input_ids, attention_mask, kernel=self.kernel)
        return output


def export_network(network: Transformer, kernel: AttentionKernel = fused_attention) -> ExportedProgram:
    """Return the network as a program of torch.export, for any batch size and any lengths within the context.

    kernel: how the graph computes attention. Raise ClearheadError if the graph cannot be traced, for example because
    weights are packed, or the network reads audio.
    """
    if is_packed(network):
        raise ClearheadError("packed weights cannot be exported; load the model with full weights instead")
    if network.config.reads_audio:
        raise ClearheadError("a model that reads audio cannot be exported; to_huggingface gives a module that can be")
    inputs, lengths = _example_inputs(network), {"decoder_input_ids": "target_length"}
    limit = network.config.context
    batch = Dim("batch")
    dims = {name: Dim(name, max=limit) for name in {lengths.get(each, "length") for each in inputs}}
    shapes = {name: {0: batch, 1: dims[lengths.get(name, "length")]} for name in inputs}
    wrapper = (_Translator if network.config.is_encoder_decoder else _Reader)(network, kernel).eval()
    try:
        with torch.no_grad(), _without_warnings():
            return torch.export.export(wrapper, (), kwargs=inputs, dynamic_shapes=shapes)
    except Exception as error:  # torch.export raises many types, none of which is documented
        reason = shorten(str(error).splitlines()[0])
        raise ClearheadError(
            f"torch.export cannot trace this network: {reason}; run it with PyTorch instead"
        ) from error


def _example_inputs(network: Transformer) -> dict[str, Tensor]:
    """Return inputs to trace a network with, by name."""
    config, device = network.config, network.device
    ones = torch.ones(_EXAMPLE, dtype=torch.int64, device=device)
    inputs = {"input_ids": ones, "attention_mask": ones.clone()}
    if config.is_encoder_decoder:
        return inputs | {"decoder_input_ids": ones[:, :-2].clone()}
    types = config.output_stack.token_embedding.num_token_types
    return inputs | ({"token_type_ids": torch.zeros_like(ones)} if types else {})


def save_onnx(network: Transformer, path: Path) -> list[Path]:
    """Write an ONNX file, atomically; return the files written: weights of more than 2 GiB are in a file beside it.

    The output is `logits`, or `last_hidden_state` of a network without head.
    """
    _require_packages()
    # ONNX has no fused attention in this opset; its parts also have plain strides, which the exporter needs.
    program = export_network(network, reference_attention)
    has_logits = network.head is not None or network.classifier is not None
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    with TemporaryDirectory(dir=path.parent) as folder:
        staged = Path(folder) / path.name
        try:
            with _without_warnings():
                converted: Any = torch.onnx.export(
                    program,
                    opset_version=_OPSET,
                    output_names=["logits" if has_logits else "last_hidden_state"],
                    verbose=False,
                )
                converted.save(staged, external_data=num_bytes > _MAX_FILE_BYTES)
        except Exception as error:  # an operation without a translation; the type depends on the operation
            reason = shorten(str(error).splitlines()[0])
            raise ClearheadError(f"ONNX cannot express this network: {reason}; save it in another format") from error
        files = sorted(Path(folder).iterdir())
        for file in files:
            file.replace(path.parent / file.name)
    return [path.parent / file.name for file in files]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide the warnings and the log of the exporters, which concern their own code."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _require_packages() -> None:
    """Raise ClearheadError unless the packages that write ONNX files are installed."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ClearheadError(f"writing ONNX needs {' and '.join(missing)}; run: pip install 'clearhead[onnx]'")
    import_module("onnxscript")
