"""Greedy decoding and beam search of a decoder compared with transformers' generate.

check_greedy(model, network, case, 40); check_beams(model, network, case, 12)
"""

from torch import Tensor, nn

from clearhead.generation.beam import beam_search
from clearhead.generation.decoding import decode
from clearhead.generation.sequences import TokenSequence
from clearhead.options import BeamOptions, SamplingOptions
from tests.parity.harness import Case, make_inputs


def check_greedy(model, network, case, count):
    """Compare the greedy continuations of a left-padded batch with transformers' generate."""
    inputs = make_inputs(case, network.config, padded=True)
    theirs = _generate(model, case, inputs, max_new_tokens=count)
    sequences = [TokenSequence(prompt, SamplingOptions(max_new_tokens=count)) for prompt in _prompts(inputs)]
    for _ in decode(network, sequences):
        pass
    assert [sequence.tokens for sequence in sequences] == theirs


def check_beams(model, network, case, count):
    """Compare the best of four beams for a left-padded batch with transformers' generate."""
    inputs = make_inputs(case, network.config, padded=True)
    theirs = _generate(model, case, inputs, max_new_tokens=count, num_beams=4)
    found = beam_search(network, _prompts(inputs), BeamOptions(num_beams=4, max_new_tokens=count))
    assert [beams[0].tokens for beams in found] == theirs


def _prompts(inputs: dict[str, Tensor]) -> list[list[int]]:
    """Return the tokens of each text without padding."""
    return [row[real.bool()].tolist() for row, real in zip(inputs["tokens"], inputs["attention_mask"], strict=True)]


def _generate(model: nn.Module, case: Case, inputs: dict[str, Tensor], **options: int) -> list[list[int]]:
    """Return the new tokens of transformers, for all texts at once or for each alone, as the case asks for."""
    tokens, mask = inputs["tokens"], inputs["attention_mask"]
    if case.rows_alone:
        batches = [(row[real][None], real[real][None]) for row, real in zip(tokens, mask.bool(), strict=True)]
    else:
        batches = [(tokens, mask)]
    found: list[list[int]] = []
    for ids, real in batches:
        output = model.generate(
            input_ids=ids, attention_mask=real, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        found += output[:, ids.shape[1] :].tolist()
    return found
