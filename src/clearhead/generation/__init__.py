"""From a prompt to new tokens.

    rows = [Row(prompt_ids, SamplingOptions(max_new_tokens=64))]; list(decode(network, rows)); rows[0].tokens

The loop is decode.py; how a token is chosen is sampling.py; what may be asked is options.py. speaker.py stands around
them all: prompts as people write them, and what became of them.
"""
