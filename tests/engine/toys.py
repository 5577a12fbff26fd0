"""Toy engines: a few small pages, so that schedules run out of them."""

import torch

from clearhead.engine import Engine
from clearhead.engine.executor import ModuleExecutor
from clearhead.engine.memory import bytes_per_token
from clearhead.engine.sequence import PENDING
from clearhead.generation.plain import decode_plainly
from clearhead.model import EncoderOutput


def toy_engine(network, num_pages=12, page_size=4, max_tokens=16, max_sequences=4, deterministic=None):
    dtype = next(network.parameters()).dtype
    memory = bytes_per_token(network.config.output_stack, dtype) * page_size * num_pages
    return Engine(
        network,
        memory=memory,
        page_size=page_size,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        deterministic=deterministic,
    )


def plain_tokens(network, request):
    """Return the tokens of the loop without a cache, which is the reference."""
    encoder_output: EncoderOutput | None = None
    if request.source:
        encoder_output = network.encode(torch.tensor([list(request.source)], device=network.device))
    with torch.no_grad():
        return list(decode_plainly(network, request.prompt, request.options, encoder_output))


def check_prompt_logprobs(network, request, found):
    """Assert that the log-probabilities of a prompt are those of one forward pass over all of it."""
    if request.prompt_logprobs is None:
        assert found is None
        return
    tokens = torch.tensor([list(request.prompt)])
    with torch.no_grad():
        if request.source:
            logits = network.decode(tokens, network.encode(torch.tensor([list(request.source)])))
        else:
            logits = network(tokens)
    expected = logits[0, :-1].float().log_softmax(-1)
    torch.testing.assert_close(found.chosen, expected.gather(1, tokens[0, 1:, None])[:, 0])
    if len(request.prompt) > 1:
        torch.testing.assert_close(found.top, expected.topk(request.prompt_logprobs).values)
        torch.testing.assert_close(expected.gather(1, found.top_ids), found.top)


def finished_tokens(events):
    """Return the tokens and the finish reason of each request in a list of events."""
    tokens, reasons = {}, {}
    for event in events:
        tokens.setdefault(event.request_id, [])
        if event.token is not None:
            tokens[event.request_id].append(event.token)
        if event.finish_reason is not None:
            assert event.request_id not in reasons, "a request finishes once"
            reasons[event.request_id] = event.finish_reason
    return tokens, reasons


def check_no_page_is_lost(engine):
    """Assert that every page is free or cached once the engine has nothing to do."""
    for pool in (engine.scheduler.pool, engine.scheduler.source_pool):
        if pool is not None:
            assert pool.num_used == 0
            assert sum(pool.reference_counts) == 0
            assert sorted([*pool.free, *pool.cached]) == list(range(pool.num_pages))


class DelayedExecutor(ModuleExecutor):
    """An executor like that of a GPU: the host knows tokens one step later, but the next step reads them already."""

    def start(self, items):
        pending = [item.sequence for item in items if item.sequence.num_pending]
        for sequence in pending:
            reason = sequence.finish_reason
            sequence.append(self.chosen[sequence])
            sequence.finish_reason = reason
        done = super().start(items)
        for sequence in pending:
            sequence.output.pop()
            sequence.num_pending += 1
            sequence.table.tokens[sequence.num_known] = PENDING
        self.chosen.update({sequence: choice.token for sequence, choice in done.choices})
        return done


def delay(engine):
    """Let the engine run as on a GPU: each step starts before the tokens of the one before are known."""
    executor = DelayedExecutor(engine.executor.runner, engine.executor.sampler, is_asynchronous=True)
    object.__setattr__(executor, "chosen", {})
    engine.executor = executor
    return engine
