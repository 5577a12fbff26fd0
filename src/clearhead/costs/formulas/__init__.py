"""Closed formulas: what each operation of a network takes in parameters, FLOPs, bytes and memory."""
