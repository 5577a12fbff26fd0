"""The same numbers sooner: weights in few bits, tokens in kernels, and the plain network as the oracle of both.

    clearhead.fast.stack.accelerate(clearhead.fast.modules.pack_network(network, "int4"))

packed        weights in groups of 32 that share a scale; GGUF's own blocks
modules       the network's modules with packed weights
stack, plan   on a processor: one call for a prompt or a token (cpu: the library; step.cpp and its headers: the source)
watch         whether a plan still says what the modules say
attention     on a processor, where the modules run: their attention alone
cuda          on an NVIDIA GPU: the whole step in one graph (launch; triton_products, triton_attention)
"""
