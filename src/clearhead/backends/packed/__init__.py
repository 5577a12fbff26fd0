"""Weights in 8 or 4 bits: storage formats and the modules that hold them."""
