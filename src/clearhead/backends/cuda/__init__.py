"""Decoding on NVIDIA GPUs: Triton kernels and one CUDA graph per step."""
