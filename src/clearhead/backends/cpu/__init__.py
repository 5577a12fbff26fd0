"""The CPU backend: a decoder whose layers run in one call of the C++ kernels.

stack              AcceleratedStack, which takes the place of the decoder; `accelerate` installs it
plan               the decoder's layers as C++ structures, and the call that runs new tokens through them
layer_structures   lowered blocks as C++ structures
attention_inputs   what changes with every call: cache addresses, masks, rotation angles
packed_inputs      the same for packed tokens: pages of keys and values, layouts
change_detector    whether a plan still describes the modules it was built from
"""

from clearhead.backends.cpu.stack import AcceleratedStack, accelerate, has_independent_rows

__all__ = ["AcceleratedStack", "accelerate", "has_independent_rows"]
