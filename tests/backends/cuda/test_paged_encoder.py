"""Encoder-decoders in PagedDecoder against the network's modules, which read one source and one target at a time."""

from dataclasses import replace

import pytest
import torch

from clearhead.backends.cuda.paged_decoder import PagedDecoder
from clearhead.backends.cuda.paged_steps import DecodeStep
from clearhead.backends.cuda.sampler import Sampler
from clearhead.backends.cuda.seats import SeatedSequence
from clearhead.backends.modules import pack_network
from clearhead.cache import PagePool, PageStorage
from clearhead.families import preset
from clearhead.model import Transformer
from clearhead.options import SamplingOptions
from tests.backends.cuda.test_paged_decoder import DEVICE, make_layout, relative_error, some_tokens
from tests.model.toys import redraw
from tests.toy_presets import shrink

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAGE_SIZE = 4
SOURCES = [some_tokens(11, 3), some_tokens(1, 7), some_tokens(6, 2)]
TARGETS = [some_tokens(1, 1), some_tokens(6, 4), some_tokens(3, 2)]
# Buckets that all layers share or each has alone, norms before and after branches, and added positions of three kinds.
# The interpreter takes seconds for each, so most are slow tests; on a GPU all of them take a moment.
NETWORKS = [
    "t5-v1.1-small",
    "bart-base",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("umt5-small", "marian", "transformer-base", "pegasus-large")
    ),
]


def make_network(name):
    """Return a few layers of a preset at toy size, with buckets that differ within the short texts of these tests."""
    config = shrink(preset(name))
    network = Transformer(
        replace(
            config,
            encoder=replace(config.encoder, layers=_layers(config.encoder, 1)),
            decoder=replace(config.decoder, layers=_layers(config.decoder, 2)),
        )
    )
    redraw(network)
    return network.to(DEVICE).eval()


def _layers(stack, count):
    layers = stack.layers[:count]
    if not hasattr(layers[0].attention.position, "max_distance"):
        return layers
    position = replace(layers[0].attention.position, num_buckets=8, max_distance=6)
    return tuple(replace(layer, attention=replace(layer.attention, position=position)) for layer in layers)


class Texts:
    """Sources that have been encoded and targets that grow, in pages in any order."""

    def __init__(self, network, sources=SOURCES, num_pages=40):
        self.network, self.sources, self.targets = network, sources, [[] for _ in sources]
        pools = [PagePool(num_pages, PAGE_SIZE), PagePool(num_pages, PAGE_SIZE)]
        for pool, factor in zip(pools, (7, 11), strict=True):
            pool.free.sort(key=lambda page, factor=factor: page * factor % num_pages)
        kind = next(network.parameters()).dtype, network.device
        storage = PageStorage.for_stack(network.config.decoder, pools[0], *kind)
        source_storage = PageStorage.for_sources(network.config.decoder, pools[1], *kind)
        self.decoder = PagedDecoder(network, storage, num_seats=5, source_storage=source_storage)
        self.tables = [pools[0].create_table([]) for _ in sources]
        self.source_tables = [pools[1].create_table([]) for _ in sources]
        for table, source in zip(self.source_tables, sources, strict=True):
            table.append(source)
        self.source_layout = make_layout(self.source_tables, [len(source) for source in sources])
        tokens = torch.tensor([token for source in sources for token in source], device=DEVICE)
        self.decoder.encode(tokens, self.source_layout)

    def append(self, targets):
        """Add tokens to every target and return the tensors of the new ones."""
        for table, target, new in zip(self.tables, self.targets, targets, strict=True):
            table.append(new)
            target += new
        layout = make_layout(self.tables, [len(new) for new in targets])
        tokens = torch.tensor([token for new in targets for token in new], device=DEVICE)
        return tokens, layout, layout.sequence_starts[1:].long() - 1, self.source_layout

    def expected_logits(self):
        """Return the logits after the last token of each target, which is read alone and without a cache."""
        rows = []
        for source, target in zip(self.sources, self.targets, strict=True):
            encoded = self.network.encode(torch.tensor([source], device=DEVICE))
            rows.append(self.network.decode(torch.tensor([target], device=DEVICE), encoded)[0, -1])
        return torch.stack(rows)

    def take_seats(self, seats, tokens):
        sequences = [
            SeatedSequence(
                seat=seat,
                num_tokens=table.num_tokens,
                pages=table.pages,
                options=SamplingOptions(),
                source_pages=source_table.pages,
                source_length=source_table.num_tokens,
            )
            for seat, table, source_table in zip(seats, self.tables, self.source_tables, strict=True)
        ]
        self.decoder.seats.assign(sequences)
        self.decoder.seats.token[seats] = tokens


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_packed_targets_and_their_next_chunks_give_the_logits_of_the_modules(name):
    texts = Texts(make_network(name))
    for targets in (TARGETS, [some_tokens(2, 9), some_tokens(1, 5), some_tokens(5, 8)]):
        found = texts.decoder.prefill(*texts.append(targets))
        assert relative_error(found, texts.expected_logits()) < 1e-4


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("bits", "batch"), [(None, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, 3), ("int8", 3)))]
)
@torch.no_grad()
def test_steps_give_the_logits_of_the_modules(name, bits, batch):
    """Seats are in another order than rows, one row has no seat, and with packed weights x is rounded to eight bits."""
    network = make_network(name)
    if bits is not None:
        pack_network(network, bits)
    texts = Texts(network, SOURCES[:batch])
    decoder, seats, size = texts.decoder, [3, 0, 4][:batch], batch + 1 if batch > 1 else 1
    sampler, step = Sampler(decoder.seats, size, adjust=False), DecodeStep(decoder.seats, size)
    tokens = decoder.prefill(*texts.append(TARGETS[:batch])).argmax(-1)
    for number in range(2):
        texts.append(tokens[:, None].tolist())
        if number == 0:
            texts.take_seats(seats, tokens)
            decoder.seats.activate(seats, size)
        tokens, logits = decoder.run_step(sampler, step)
        assert relative_error(logits[:batch], texts.expected_logits()) < (1e-4 if bits is None else 0.04)
        tokens = tokens[:batch].clone()
        assert tokens.tolist() == logits[:batch].argmax(-1).tolist()


@pytest.mark.slow
@torch.no_grad()
def test_a_long_source_is_divided_into_spans_and_blocks():
    network = make_network("t5-v1.1-small")
    texts = Texts(network, [some_tokens(150, 1), some_tokens(70, 3)], num_pages=80)
    tokens = texts.decoder.prefill(*texts.append([[1], [2]])).argmax(-1)
    assert relative_error(texts.decoder.prefill(*texts.append([[3], [4]])), texts.expected_logits()) < 1e-4
    texts.append(tokens[:, None].tolist())
    texts.take_seats([1, 0], tokens)
    texts.decoder.seats.activate([1, 0], 2)
    step = DecodeStep(texts.decoder.seats, 2)
    _, logits = texts.decoder.run_step(Sampler(texts.decoder.seats, 2, adjust=False), step)
    assert relative_error(logits, texts.expected_logits()) < 1e-4
    assert next(iter(step.workspaces.values()))[0].shape[1] > 1


@torch.no_grad()
def test_changed_buckets_are_noticed():
    """The kernels read the table of the network itself, so that training it or loading weights needs nothing else."""
    texts = Texts(make_network("umt5-small"))
    inputs = texts.append(TARGETS)
    before = texts.decoder.prefill(*inputs)
    for block in texts.network.decoder.layers:
        block.attention.relative_bias.weight.mul_(-2)
    found = texts.decoder.prefill(*inputs)
    assert relative_error(found, before) > 1e-2
    assert relative_error(found, texts.expected_logits()) < 1e-4
