"""Generation without a cache: the whole sequence goes through the network for every token (book E1).

    for token in decode_plainly(network, prompt_ids, SamplingOptions(max_new_tokens=64)): ...

Nothing is kept, so nothing can go stale: this is the oracle of every faster way.
"""

from collections.abc import Iterator, Sequence

import torch

from clearhead.generation.penalties import TokenCounts
from clearhead.generation.sampling import choosing_device, next_tokens
from clearhead.generation.sampling_parameters import SamplingParameters
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import SamplingOptions


@torch.inference_mode()
def decode_plainly(
    network: Transformer, prompt: Sequence[int], options: SamplingOptions, encoder_output: EncoderOutput | None = None
) -> Iterator[int]:
    """New tokens after `prompt`, up to and with the first stop token; `memory` of an encoder for one source."""
    options = options.seeded()
    device = choosing_device(network.device)
    rows = SamplingParameters.of([options], network.config.vocab_size, device)
    made: list[int] = []
    while len(made) < options.max_new_tokens:
        tokens = torch.tensor([[*prompt, *made]], device=network.device)
        logits = network(tokens) if encoder_output is None else network.decode(tokens, encoder_output)
        counts = TokenCounts.of([prompt], [made], network.config.vocab_size, device)
        step = torch.tensor([len(made)], device=device)
        made.append(int(next_tokens(logits[:, -1].to(device), rows, step, counts)))
        yield made[-1]
        if made[-1] in options.stop_ids:
            return
