"""Interop: what a model offers to other libraries.

module = clearhead.load("smollm2").to_huggingface(); module.generate(input_ids, max_new_tokens=8)
"""

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from clearhead.checkpoint import ModelParts, build_module, export_network
from clearhead.checkpoint import save_onnx as write_onnx
from clearhead.files import check_output_path
from clearhead.home import expand_user


@dataclass(frozen=True, eq=False, repr=False)
class Interop(ModelParts):
    """The methods of Model that speak the language of other libraries."""

    def to_huggingface(self) -> nn.Module:
        """Return a module of the transformers library with a copy of the weights, without writing a folder.

        It computes the same logits, on the same device and in the same dtype. Raise ClearheadError if transformers is
        not installed or has no class for this architecture.
        """
        return build_module(self)

    def export(self) -> ExportedProgram:
        """Return the network as a program of torch.export, which reads whole texts of any number and length.

        program.module()(input_ids=…, attention_mask=…) computes what the network computes; an encoder-decoder also
        takes decoder_input_ids. Raise ClearheadError if the network cannot be traced.
        """
        return export_network(self.network)


def save_onnx(model: ModelParts, path: str | Path) -> list[Path]:
    """Write the network as an ONNX file for onnxruntime and other engines; return the files written.

    Inputs are input_ids, attention_mask and, where the model has them, token_type_ids or decoder_input_ids, all int64.
    The graph reads whole texts: it has no cache. Weights of more than 2 GiB are written to a second file.
    """
    path = expand_user(path)
    check_output_path(path, (".onnx",))
    return write_onnx(model.network, path)
