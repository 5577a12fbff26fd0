"""Greedy decoding and beam search of a decoder compared with transformers' generate.

check_greedy(model, network, case, 40); check_beams(model, network, case, 12)
"""

from clearhead.generation.beam import beam_search
from clearhead.generation.decoding import decode
from clearhead.generation.sequences import TokenSequence
from clearhead.options import BeamOptions, SamplingOptions
from tests.parity.harness import make_inputs


def check_greedy(model, network, case, count):
    """Compare the greedy continuations of a left-padded batch with transformers' generate."""
    inputs = make_inputs(case, network.config, padded=True)
    tokens, mask = inputs["tokens"], inputs["attention_mask"]
    length = tokens.shape[1]
    theirs = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )[:, length:]
    prompts = [row[real.bool()].tolist() for row, real in zip(tokens, mask, strict=True)]
    sequences = [TokenSequence(prompt, SamplingOptions(max_new_tokens=count)) for prompt in prompts]
    for _ in decode(network, sequences):
        pass
    assert [sequence.tokens for sequence in sequences] == theirs.tolist()


def check_beams(model, network, case, count):
    """Compare the best of four beams for a left-padded batch with transformers' generate."""
    inputs = make_inputs(case, network.config, padded=True)
    tokens, mask = inputs["tokens"], inputs["attention_mask"]
    options = {"num_beams": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=count, **options)
    theirs = theirs[:, tokens.shape[1] :]
    prompts = [row[real.bool()].tolist() for row, real in zip(tokens, mask, strict=True)]
    found = beam_search(network, prompts, BeamOptions(num_beams=4, max_new_tokens=count))
    assert [beams[0].tokens for beams in found] == theirs.tolist()
