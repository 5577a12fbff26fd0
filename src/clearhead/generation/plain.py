"""Generation without a cache: the network reads the whole sequence again for every token (book E1).

    for token in decode_plainly(network, prompt_ids, SamplingOptions(max_new_tokens=64)): ...

It keeps no state between tokens, so nothing can become stale: tests compare every faster loop with it.
"""

from collections.abc import Iterator, Sequence

import torch

from clearhead.model import EncoderOutput, Transformer
from clearhead.options import SamplingOptions
from clearhead.sampling import SamplingParameters, TokenCounts, next_tokens, sampling_device


@torch.inference_mode()
def decode_plainly(
    network: Transformer, prompt: Sequence[int], options: SamplingOptions, encoder_output: EncoderOutput | None = None
) -> Iterator[int]:
    """Yield the new tokens after `prompt`, up to and including the first stop token.

    encoder_output: that of one source, for an encoder-decoder.
    """
    options = options.with_seed()
    device = sampling_device(network.device)
    parameters = SamplingParameters.from_options([options], network.config.vocab_size, device)
    output: list[int] = []
    while len(output) < options.max_new_tokens:
        tokens = torch.tensor([[*prompt, *output]], device=network.device)
        logits = network(tokens) if encoder_output is None else network.decode(tokens, encoder_output)
        counts = TokenCounts.from_tokens([prompt], [output], network.config.vocab_size, device)
        step = torch.tensor([len(output)], device=device)
        output.append(int(next_tokens(logits[:, -1].to(device), parameters, step, counts)))
        yield output[-1]
        if output[-1] in options.stop_ids:
            return
