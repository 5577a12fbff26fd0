"""PagedDecoder against the network's modules with PackedCache, on a GPU or in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from clearhead.backends.cuda import mixture
from clearhead.backends.cuda.paged_decoder import PagedDecoder
from clearhead.backends.cuda.paged_steps import DecodeStep
from clearhead.backends.cuda.sampler import Sampler
from clearhead.backends.cuda.seats import SeatedSequence
from clearhead.backends.modules import pack_network
from clearhead.cache import PackedCache, PackedLayout, PagePool, PageStorage
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.model import Transformer
from clearhead.options import SamplingOptions
from tests.backends.networks import GRAPH_NETWORKS, graph_network, toy_network
from tests.model.toys import VOCAB, redraw
from tests.toy_presets import shrink

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_SIZE = 4


def make_layout(tables, counts):
    """Lay out the last `counts` tokens of each page table side by side."""
    slots, positions = [], []
    for table, count in zip(tables, counts, strict=True):
        slots += table.slots(table.num_tokens - count, table.num_tokens)
        positions += range(table.num_tokens - count, table.num_tokens)
    width = max(len(table.pages) for table in tables)
    starts = torch.tensor([0, *counts]).cumsum(0)
    return PackedLayout(
        positions=torch.tensor(positions, device=DEVICE),
        slots=torch.tensor(slots, device=DEVICE),
        sequence_starts=starts.int().to(DEVICE),
        lengths=torch.tensor([table.num_tokens for table in tables], dtype=torch.int32, device=DEVICE),
        page_tables=torch.tensor(
            [[*table.pages, *[0] * (width - len(table.pages))] for table in tables], dtype=torch.int32, device=DEVICE
        ),
    )


class Pages:
    """A pool of shuffled pages with the tables of some sequences, and their storage."""

    def __init__(self, network, num_sequences, num_pages=40):
        self.network = network
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.pool.free.sort(key=lambda page: page * 7 % num_pages)
        self.tables = [self.pool.create_table([]) for _ in range(num_sequences)]
        dtype = next(network.parameters()).dtype
        self.storage = PageStorage.for_stack(network.config.decoder, self.pool, dtype, network.device)

    def append(self, texts):
        """Add tokens to each table; return all tokens (T,) side by side, their layout, and the last of each text."""
        for table, text in zip(self.tables, texts, strict=True):
            table.append(text)
        used = [(table, len(text)) for table, text in zip(self.tables, texts, strict=True) if text]
        layout = make_layout(*zip(*used, strict=True))
        tokens = torch.tensor([token for text in texts for token in text], device=DEVICE)
        return tokens, layout, layout.sequence_starts[1:].long() - 1

    def expected_logits(self, tokens, layout, last_tokens):
        hidden = self.network.hidden_states(tokens[None], cache=PackedCache(self.storage, layout))[0]
        return self.network.compute_logits(hidden[last_tokens])


def some_tokens(count, start):
    return [(start + 3 * number) % VOCAB for number in range(count)]


def relative_error(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


# Mixtures, latent attention, norms in other places, ALiBi, softcaps, chunks and temperatures; the others are plain.
OTHER_NETWORKS = (
    *("qwen3-30b-a3b", "deepseek-v3", "deepseek-v2-lite", "gpt1", "palm-8b", "gpt3-760m", "bloom-560m", "mpt-7b"),
    *("llama-4-scout", "llama-4-maverick", "grok-1"),
)


def make_network(name):
    """Return two layers of a preset at toy size: of those with two kinds of layers, one of each."""
    if name in GRAPH_NETWORKS:
        return graph_network(name, DEVICE)
    config = shrink(preset(name))
    layers = config.decoder.layers
    network = Transformer(replace(config, decoder=replace(config.decoder, layers=(layers[2:4] or layers)[-2:])))
    redraw(network)
    return network.to(DEVICE).eval()


PROMPTS = [some_tokens(9, 1), some_tokens(1, 4), some_tokens(17, 2)]
CHUNKS = [some_tokens(2, 5), [], some_tokens(6, 9)]


@pytest.mark.parametrize("name", GRAPH_NETWORKS + OTHER_NETWORKS)
@torch.no_grad()
def test_packed_prompts_and_their_next_chunks_give_the_logits_and_pages_of_the_modules(name, monkeypatch):
    monkeypatch.setattr(mixture, "_MAX_CAPTURED_ROWS", 0)  # prompts of experts in grouped products
    network = make_network(name)
    ours, reference = Pages(network, 3), Pages(network, 3)
    decoder = PagedDecoder(network, ours.storage, num_seats=4)
    for texts in (PROMPTS, CHUNKS):
        found = decoder.prefill(*ours.append(texts))
        assert relative_error(found, reference.expected_logits(*reference.append(texts))) < 1e-4
    for layer, pair in ours.storage.layers.items():
        for tensor, expected in zip(pair, reference.storage.layers[layer], strict=True):
            torch.testing.assert_close(tensor, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "bits", "batch"),
    [
        *((name, None, 3) for name in GRAPH_NETWORKS + OTHER_NETWORKS),
        *((name, None, 1) for name in ("qwen3-30b-a3b", "deepseek-v3", "palm-8b")),
        *(("llama-3.2-1b", None, 1), ("gemma-3-1b", None, 1), ("llama-3.2-1b", "int8", 1), ("gpt2", "int4", 3)),
    ],
)
@torch.no_grad()
def test_a_step_over_pages_gives_the_logits_of_the_modules(name, bits, batch):
    """Seats are in another order than rows, one row has no seat, and with packed weights x is rounded to eight bits."""
    network = make_network(name)
    if bits is not None:
        pack_network(network, bits)
    ours, reference = Pages(network, batch), Pages(network, batch)
    decoder = PagedDecoder(network, ours.storage, num_seats=5)
    seats, texts = [3, 0, 4][:batch], PROMPTS[:batch]
    tokens = decoder.prefill(*ours.append(texts)).argmax(-1)
    reference.expected_logits(*reference.append(texts))
    inputs = ours.append(tokens[:, None].tolist())
    decoder.seats.assign(
        [
            SeatedSequence(seat=seat, num_tokens=table.num_tokens, pages=table.pages, options=SamplingOptions())
            for seat, table in zip(seats, ours.tables, strict=True)
        ]
    )
    decoder.seats.token[seats] = tokens
    size = batch + 1 if batch > 1 else 1
    decoder.seats.activate(seats, size)
    chosen, logits = decoder.run_step(Sampler(decoder.seats, size, adjust=False), DecodeStep(decoder.seats, size))
    expected = reference.expected_logits(*reference.append(tokens[:, None].tolist()))
    assert relative_error(logits[:batch], expected) < (1e-4 if bits is None else 0.04)
    assert chosen[:batch].tolist() == logits[:batch].argmax(-1).tolist()
    assert decoder.seats.position[seats].tolist() == [table.num_tokens for table in ours.tables]
    assert inputs[1].lengths.tolist() == [table.num_tokens for table in ours.tables]


@torch.no_grad()
def test_long_sequences_are_divided_into_spans():
    network = graph_network("llama-3.2-1b", DEVICE)
    texts = [some_tokens(140, 1), some_tokens(33, 2), some_tokens(3, 5)]
    ours, reference = Pages(network, 3, num_pages=60), Pages(network, 3, num_pages=60)
    decoder = PagedDecoder(network, ours.storage, num_seats=3)
    for pages in (ours, reference):
        pages.expected_logits(*pages.append(texts))
        inputs = pages.append([[7], [8], [9]])
    decoder.seats.assign(
        [
            SeatedSequence(seat=seat, num_tokens=table.num_tokens, pages=table.pages, options=SamplingOptions())
            for seat, table in enumerate(ours.tables)
        ]
    )
    decoder.seats.token.copy_(inputs[0])
    decoder.seats.activate([0, 1, 2], 3)
    step = DecodeStep(decoder.seats, 3)
    for _ in range(2):  # the counters are reset, so a second step gives the same logits
        decoder.seats.position.copy_(inputs[1].positions)
        decoder.seats.token.copy_(inputs[0])
        _, logits = decoder.run_step(Sampler(decoder.seats, 3, adjust=False), step)
        assert relative_error(logits, reference.expected_logits(*inputs)) < 1e-4
    (workspace,) = step.workspaces.values()
    assert workspace[0].shape[1] > 1
    assert not workspace[1].any()


@pytest.mark.parametrize("name", ["gopher-280b", "annotated-transformer", "mpt-7b-storywriter"])
def test_an_unsupported_model_is_refused_with_the_reason(name):
    network = toy_network(name)
    with pytest.raises(ClearheadError, match="cannot run in the GPU kernels: "):
        PagedDecoder(network, PageStorage(PagePool(4, 4)))


def test_a_step_needs_at_least_one_sequence_and_at_most_one_for_every_seat():
    network = graph_network("gpt2", DEVICE)
    decoder = PagedDecoder(network, Pages(network, 1).storage, num_seats=2)
    for seats in ([], [0, 1, 0]):
        with pytest.raises(ClearheadError, match=f"a step has {len(seats)} sequences; this decoder takes 1 to 2"):
            decoder.step(seats)
