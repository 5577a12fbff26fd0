"""What a recurrent encoder-decoder computes, as closed formulas from its config (book F4).

    recurrent_flops(config, source=20, target=30)   # {"encoder": ..., "attention": ..., "decoder": ..., "head": ...}

A layer has W (gates · D, inputs) and U (gates · D, D), so one token takes 2 · gates · D · (inputs + D) FLOPs. Tokens of
a sequence follow one another, so S + T steps are sequential, however many processors there are.
"""

from clearhead.model import RecurrentConfig

_GATES = {"tanh": 1, "gru": 3, "lstm": 4}


def recurrent_flops(config: RecurrentConfig, *, source: int, target: int, batch: int = 1) -> dict[str, int]:
    """Return the FLOPs of the matrix products of one forward pass by part; `source` and `target` are lengths."""
    width, gates = config.width, _GATES[config.cell]
    directions = 2 if config.bidirectional else 1
    state = width // directions  # of one direction

    def layers(first_inputs: int, state: int) -> int:
        inputs = [first_inputs] + [width] * (config.num_layers - 1)
        return sum(2 * gates * state * (each + state) for each in inputs)

    attends = config.attention == "dot_product"
    parts = {
        "encoder": source * directions * layers(config.embedding_width, state),
        "attention": target * 2 * 2 * source * width if attends else 0,  # scores, and the sum of the states
        "decoder": target * layers(config.embedding_width + (width if attends else 0), width),
        "head": target * 2 * width * config.target_vocab_size,
    }
    return {name: batch * flops for name, flops in parts.items()}
