"""Measure PagedDecoder on an NVIDIA GPU as an engine uses it: ragged prompts packed into chunks, then steps.

    python benchmarks/engine_cuda.py llama-3.2-1b llama-3.1-8b

The weights are random, since the speed does not depend on them. Each line is one JSON object: the tokens per second of
the second call, from the lists of prompt tokens to the lists of new tokens, and the time to the first token.
"""

import argparse
import json
import random
import time
from collections import deque

import torch

from clearhead.backends import PagedDecoder, SeatedSequence, pack_network
from clearhead.cache import PackedLayout, PagePool, PageStorage, PageTable
from clearhead.families import preset
from clearhead.model import Transformer
from clearhead.options import SamplingOptions

PAGE_SIZE, TOKEN_BUDGET, NUM_SEATS = 16, 8192, 256
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}


def random_network(name: str, num_layers: int | None = None) -> Transformer:
    torch.manual_seed(0)
    with torch.device("meta"):
        network = Transformer(preset(name)).to(torch.bfloat16)
    network = network.to_empty(device="cuda").eval().requires_grad_(False)
    for weight in network.parameters():
        weight.normal_(std=0.02) if weight.ndim > 1 else weight.fill_(1)
    return network


def make_decoder(network: Transformer, num_tokens: int, max_tokens: int) -> PagedDecoder:
    pool = PagePool(-(-num_tokens // PAGE_SIZE) + NUM_SEATS, PAGE_SIZE)
    storage = PageStorage.for_stack(network.config.output_stack, pool, torch.bfloat16, torch.device("cuda"))
    return PagedDecoder(network, storage, NUM_SEATS, max_tokens)


def lay_out(parts: list[tuple[PageTable, int, int]]) -> PackedLayout:
    """Lay out the tokens from `start` to `stop` of each table side by side."""
    tables = [table.pages[: -(-stop // PAGE_SIZE)] for table, _, stop in parts]
    width = max(map(len, tables))
    starts = [0]
    for _, start, stop in parts:
        starts.append(starts[-1] + stop - start)

    def upload(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype).pin_memory().to("cuda", non_blocking=True)

    return PackedLayout(
        positions=upload([position for _, start, stop in parts for position in range(start, stop)]),
        slots=upload([slot for table, start, stop in parts for slot in table.slots(start, stop)]),
        sequence_starts=upload(starts, torch.int32),
        lengths=upload([stop for _, _, stop in parts], torch.int32),
        page_tables=upload([[*pages, *[0] * (width - len(pages))] for pages in tables], torch.int32),
    )


def read_prompts(decoder, prompts, tables, options):
    """Read all prompts in chunks of TOKEN_BUDGET tokens; yield the seats that are complete and their first tokens."""
    waiting = deque((seat, 0) for seat in range(len(prompts)))
    while waiting:
        parts, seats, budget = [], [], TOKEN_BUDGET
        while waiting and budget:
            seat, start = waiting.popleft()
            stop = min(start + budget, len(prompts[seat]))
            parts.append((seat, start, stop))
            budget -= stop - start
            if stop < len(prompts[seat]):
                waiting.appendleft((seat, stop))
            else:
                seats.append((seat, len(parts) - 1))
        layout = lay_out([(tables[seat], start, stop) for seat, start, stop in parts])
        tokens = [token for seat, start, stop in parts for token in prompts[seat][start:stop]]
        tokens = torch.tensor(tokens).pin_memory().to("cuda", non_blocking=True)
        last = layout.sequence_starts[1:].long() - 1
        if len(seats) < len(parts):
            last = last[torch.tensor([part for _, part in seats], device="cuda")]
        logits = decoder.prefill(tokens, layout, last)
        seats = [seat for seat, _ in seats]
        if seats:
            decoder.seats.assign(
                [
                    SeatedSequence(
                        seat=seat, num_tokens=len(prompts[seat]), pages=tables[seat].pages, options=options[seat]
                    )
                    for seat in seats
                ]
            )
            yield seats, decoder.choose(logits, seats)


def generate(decoder, prompts, num_new, options):
    """Return the new tokens of all prompts (at most NUM_SEATS), and the time until the first ones."""
    start, pool = time.perf_counter(), decoder.storage.pool
    tables = [pool.create_table([]) for _ in prompts]
    for table, prompt in zip(tables, prompts, strict=True):
        table.append(prompt)
    first = list(read_prompts(decoder, prompts, tables, options))
    texts = [[] for _ in prompts]
    for seats, tokens in first:
        for seat, token in zip(seats, tokens.result(), strict=True):
            texts[seat].append(token)
    time_to_first = time.perf_counter() - start
    pending = None
    for number in range(1, max(num_new)):
        seats = [seat for seat in range(len(prompts)) if number < num_new[seat]]
        grown = []
        for seat in seats:
            pages = len(tables[seat].pages)
            tables[seat].append([0])
            if len(tables[seat].pages) > pages:
                grown.append((seat, pages, tables[seat].pages[-1]))
        if grown:
            decoder.seats.add_pages(*zip(*grown, strict=True))
        following = seats, decoder.step(seats)
        if pending is not None:
            for seat, token in zip(pending[0], pending[1].result(), strict=True):
                texts[seat].append(token)
        pending = following
    if pending is not None:
        for seat, token in zip(pending[0], pending[1].result(), strict=True):
            texts[seat].append(token)
    for table in tables:
        table.free()
    return texts, time_to_first


def measure(decoder, prompts, num_new, sampling, rounds=2):
    options = [SamplingOptions(seed=row, **sampling) for row in range(len(prompts))]
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        texts, time_to_first = generate(decoder, prompts, num_new, options)
        seconds = time.perf_counter() - start
    assert [len(text) for text in texts] == num_new
    assert all(token >= 0 for text in texts for token in text)
    return {"tokens_per_second": round(sum(num_new) / seconds, 1), "first_token_s": round(time_to_first, 4)}


def cases(vocab: int):
    """Yield the name of a case, its prompts and how many tokens each gets."""
    rng = random.Random(0)

    def prompt(length):
        return [rng.randrange(vocab) for _ in range(length)]

    def ragged(count):
        return [prompt(rng.randint(16, 256)) for _ in range(count)]

    yield "one", [prompt(128)], [512]
    yield "64", ragged(64), [256] * 64
    yield "256", ragged(256), [256] * 256
    yield "leaving", ragged(64), [4 * n + 1 for n in range(64)]
    yield "long", [prompt(6000)], [2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["llama-3.2-1b"])
    parser.add_argument("--cases", default="one,64,256,leaving,long")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--weights", choices=("full", "int8", "int4"), default="full")
    arguments = parser.parse_args()
    for name in arguments.models:
        network = random_network(name)
        if arguments.weights != "full":
            pack_network(network, arguments.weights)
        decoder = make_decoder(network, NUM_SEATS * 576, 8192)
        for case, prompts, num_new in cases(network.config.vocab_size):
            if case not in arguments.cases.split(","):
                continue
            for mode, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
                result = measure(decoder, prompts, num_new, sampling, arguments.rounds)
                line = {"model": name, "weights": arguments.weights, "case": case, "mode": mode} | result
                print(json.dumps(line), flush=True)
        del decoder, network
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
