"""Interop: what a model offers to other libraries.

module = clearhead.load("smollm2").to_huggingface(); module.generate(input_ids, max_new_tokens=8)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from clearhead.checkpoint import ModelParts, build_module, export_network
from clearhead.checkpoint import save_onnx as write_onnx
from clearhead.files import check_output_path
from clearhead.generation import Prompt, encode_prompt
from clearhead.home import expand_user

if TYPE_CHECKING:
    from clearhead.inspection import ActivationCache, Hook, NameFilter


@dataclass(frozen=True, eq=False, repr=False)
class Interop(ModelParts):
    """The methods of Model that speak the language of other libraries."""

    def to_huggingface(self) -> nn.Module:
        """Return a module of the transformers library with a copy of the weights, without writing a folder.

        It computes the same logits, on the same device and in the same dtype. Raise ClearheadError if transformers is
        not installed or has no class for this architecture.
        """
        return build_module(self)

    def run_with_cache(
        self,
        tokens: Prompt | Tensor,
        *,
        attention_mask: Tensor | None = None,
        names_filter: "NameFilter" = None,
        remove_batch_dim: bool = False,
    ) -> "tuple[Tensor, ActivationCache]":
        """Return the logits and all activations, by the names of the TransformerLens library: cache["pattern", 0].

        tokens: a text, a list of token ids, or token ids of several texts (B, T). attention_mask: 0 for padding (B, T).
        names_filter: a name, a list of names or a function; only these activations are kept.
        remove_batch_dim: leave out the first dimension of the activations of a single text.
        """
        from clearhead.inspection import run_with_cache  # imported here because most programs never look inside

        logits, cache = run_with_cache(self.network, self._token_tensor(tokens), attention_mask, names_filter)
        return logits, cache.remove_batch_dim() if remove_batch_dim else cache

    def run_with_hooks(
        self, tokens: Prompt | Tensor, fwd_hooks: "Iterable[Hook]", *, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, T, V) with functions applied to activations, for patching and ablation.

        fwd_hooks: pairs of a name such as "blocks.3.attn.hook_z", or of a function that selects names, and of a
        function fn(activation, hook) that returns the activation to go on with; None keeps it.
        """
        from clearhead.inspection import run_with_hooks

        return run_with_hooks(self.network, self._token_tensor(tokens), fwd_hooks, attention_mask)

    def _token_tensor(self, tokens: Prompt | Tensor) -> Tensor:
        """Return token ids (B, T) on the device of the network."""
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor([encode_prompt(tokens, self.tokenizer)])
        return (tokens if tokens.ndim > 1 else tokens[None]).to(self.network.device)

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
