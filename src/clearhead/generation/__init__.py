"""From a prompt to new tokens.

for token in clearhead.generation.decode.decode(network, prompt_ids, Sampling()): ...
"""
