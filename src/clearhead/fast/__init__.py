"""The same numbers sooner: weights in few bits, a step in kernels, and the plain network as the oracle of both.

    clearhead.fast.stack.accelerate(clearhead.fast.modules.pack_network(network, "int4"))

packed        weights in groups of 32 that share a scale; GGUF's own blocks
modules       the network's modules with packed weights
stack, plan   on a processor: one call for a token (cpu: the library; step.cpp and its headers: the source)
cuda          on an NVIDIA GPU: the whole step in one graph (triton_kernels)
"""
