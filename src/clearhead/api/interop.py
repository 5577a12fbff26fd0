"""Interop: what a model offers to other libraries.

module = clearhead.load("smollm2").to_huggingface(); module.generate(input_ids, max_new_tokens=8)
"""

from dataclasses import dataclass

from torch import nn

from clearhead.checkpoint import ModelParts, build_module


@dataclass(frozen=True, eq=False, repr=False)
class Interop(ModelParts):
    """The methods of Model that speak the language of other libraries."""

    def to_huggingface(self) -> nn.Module:
        """Return a module of the transformers library with a copy of the weights, without writing a folder.

        It computes the same logits, on the same device and in the same dtype. Raise ClearheadError if transformers is
        not installed or has no class for this architecture.
        """
        return build_module(self)
