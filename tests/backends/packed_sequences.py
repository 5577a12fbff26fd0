"""Sequences over the pages of one storage, run in pieces and side by side, for tests of packed tokens."""

import torch

from clearhead.cache import PackedCache, PackedLayout, PagedEncoderOutput, PagePool, PageStorage
from clearhead.engine.batch import source_layout
from clearhead.engine.runner import Runner
from tests.model.toys import VOCAB


class PackedSequences:
    """Sequences whose keys and values are in the pages of one storage, and those of their sources in another."""

    def __init__(self, network, texts, page_size=16, num_pages=120, sources=()):
        self.network, self.texts = network, texts
        dtype = next(network.decoder.layers.parameters()).dtype
        pool = PagePool(num_pages, page_size)
        self.storage = PageStorage.for_stack(network.config.decoder, pool, dtype, torch.device("cpu"))
        self.tables = [pool.create_table([]) for _ in texts]
        self.hidden = [[] for _ in texts]
        if sources:
            source_pool = PagePool(num_pages, page_size)
            arguments = network.config.decoder, source_pool, dtype, torch.device("cpu")
            self.source_storage = PageStorage.for_sources(*arguments)
            self.source_tables = [source_pool.create_table([]) for _ in sources]
            for table, source in zip(self.source_tables, sources, strict=True):
                table.append(source)
            Runner(network, self.storage, self.source_storage).encode(sources, self.source_tables)
        else:
            self.source_tables = []

    @torch.no_grad()
    def step(self, counts):
        """Run the next tokens of some sequences: {number: how many}."""
        starts = {number: self.tables[number].num_tokens for number in counts}
        for number, count in counts.items():
            self.tables[number].append(self.texts[number][starts[number] : starts[number] + count])
        tables = [self.tables[number] for number in counts]
        longest = max(len(table.pages) for table in tables)
        rows = [list(range(starts[number], self.tables[number].num_tokens)) for number in counts]
        layout = PackedLayout(
            positions=torch.tensor([position for row in rows for position in row]),
            slots=torch.tensor(
                [slot for t, row in zip(tables, rows, strict=True) for slot in t.slots(row[0], row[-1] + 1)]
            ),
            sequence_starts=torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int(),
            lengths=torch.tensor([table.num_tokens for table in tables]).int(),
            page_tables=torch.tensor([t.pages + [0] * (longest - len(t.pages)) for t in tables]).int(),
        )
        tokens = [
            token
            for number, row in zip(counts, rows, strict=True)
            for token in self.texts[number][row[0] : row[-1] + 1]
        ]
        encoder_output = None
        if self.source_tables:
            sources = source_layout([self.source_tables[number] for number in counts], torch.device("cpu"))
            encoder_output = PagedEncoderOutput.for_targets(self.source_storage, sources, layout)
        cache = PackedCache(self.storage, layout)
        hidden = self.network.hidden_states(torch.tensor([tokens]), encoder_output=encoder_output, cache=cache)[0]
        for number, part in zip(counts, hidden.split([len(row) for row in rows]), strict=True):
            self.hidden[number].append(part)

    def results(self):
        return [torch.cat(parts) for parts in self.hidden]


def random_texts(lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def run_mixed(network, lengths=(90, 40, 17, 1, 70), page_size=16, sources=()):
    """Read prompts in pieces while other sequences run: hidden states of every token of every sequence."""
    sequences = PackedSequences(network, random_texts(lengths), page_size, sources=sources)
    sequences.step({0: 37, 3: 1})
    sequences.step({1: 5, 0: 1})
    sequences.step({0: 1, 2: 16, 1: 33, 4: 1})
    for _ in range(3):
        sequences.step({0: 1, 4: 1})
    sequences.step({4: 66, 0: 48, 1: 2, 2: 1})
    return sequences


def same_bits(first, second):
    return torch.equal(first.view(torch.int32), second.view(torch.int32))
