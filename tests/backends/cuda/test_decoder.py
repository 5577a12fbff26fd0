"""GraphDecoder against the network: its step in Triton's interpreter or on a GPU, and captured as a graph on a GPU."""

import pytest
import torch

from clearhead.backends.cuda.decoder import GraphDecoder
from clearhead.backends.live_checks import unsupported_network_reason
from clearhead.backends.modules import PackedMatrix, pack_network
from clearhead.backends.packed import PackedWeight, widen
from clearhead.checkpoint.formats import open_model
from clearhead.checkpoint.interface import LoadOptions
from clearhead.errors import ClearheadError
from tests.backends.networks import GRAPH_NETWORKS, graph_network, toy_network
from tests.checkpoint.random_blocks import save_random_blocks
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import CONTEXT, VOCAB

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def triton():
    """Skip a test that runs Triton kernels if Triton is not installed."""
    return pytest.importorskip("triton", reason="Triton is not installed")


class UncapturedDecoder:
    """A GraphDecoder whose steps run without a graph, and the texts and logits they produce."""

    def __init__(self, network, prompts, capacity=CONTEXT + 4):
        self.decoder = GraphDecoder(network, len(prompts), capacity, self.choose)
        if network.device.type == "cpu":  # one span of the cache, because the interpreter runs programs one by one
            states, num_finished = self.decoder.workspace
            self.decoder.workspace = states[:, :1].contiguous(), num_finished
        self.texts = [list(prompt) for prompt in prompts]
        self.decoder.token.copy_(self.decoder.prefill(prompts).argmax(-1))

    def choose(self, logits, num_generated):
        self.logits = logits
        return logits.argmax(-1)

    def run_step(self):
        self.texts = [[*text, token] for text, token in zip(self.texts, self.decoder.token.tolist(), strict=True)]
        self.decoder.run_step()
        return self.logits

    def relative_error(self):
        """Compare the last logits with those of the network on the whole texts."""
        expected = self.decoder.network(torch.tensor(self.texts, device=self.logits.device))[:, -1]
        return (self.logits - expected).norm() / expected.norm()


def choose_greedily(logits, num_generated):
    return logits.argmax(-1)


@pytest.mark.parametrize(("bits", "batch"), [(None, 1), (None, 3), ("int8", 1), ("int4", 3)])
@pytest.mark.parametrize("name", GRAPH_NETWORKS)
@torch.no_grad()
def test_a_step_gives_the_logits_of_the_network(name, bits, batch, triton):
    """With packed weights, x may be rounded to eight bits on one side only."""
    network = graph_network(name, DEVICE)
    assert unsupported_network_reason(network, "cuda") is None
    if bits is not None:
        pack_network(network, bits)
    decoder = UncapturedDecoder(network, [[row, 1, 2, 3] for row in range(batch)])
    decoder.run_step()
    assert decoder.relative_error() < (1e-4 if bits is None else 0.04)


@pytest.mark.parametrize(
    ("types", "batch"),  # of most matrices, of the head, of values and down projections in two of three layers
    [
        (("Q4_K", "Q6_K", "Q6_K"), 1),
        (("Q5_K", "Q6_K", "Q6_K"), 2),
        (("Q6_K", "Q6_K", "Q6_K"), 1),
        (("Q2_K", "Q6_K", "Q3_K"), 2),
        (("IQ4_XS", "MXFP4", "Q5_K"), 1),
    ],
)
@torch.no_grad()
def test_the_blocks_of_a_gguf_file_stay_packed_also_where_their_formats_differ(tmp_path, types, batch, triton):
    sizes = {"width": 256, "num_layers": 3, "num_heads": 4, "feed_forward": 512, "vocab_size": VOCAB, "context": 64}
    save_random_blocks(tmp_path / "model.gguf", tiny_network(**sizes, attention_bias=True), *types, types[0])
    options = LoadOptions(dtype=torch.float32, weights="stored", device=DEVICE)
    network = open_model(tmp_path / "model.gguf", options).network
    matrices = [part for part in network.modules() if isinstance(part, PackedMatrix)]
    for part in matrices:  # as loading onto a GPU does
        part.set_packed(widen(part.packed))
    exact = [part.packed.unpack() for part in matrices]
    assert unsupported_network_reason(network, "cuda") is None
    decoder = UncapturedDecoder(network, [[row, 1, 2, 3] for row in range(batch)])
    decoder.run_step()
    assert decoder.relative_error() < 0.04
    blocks = [layer.block for layer in decoder.decoder.layers]
    assert all(isinstance(each.weight, PackedWeight) for block in blocks for each in block.projections)
    assert all(torch.equal(part.packed.unpack(), values) for part, values in zip(matrices, exact, strict=True))


@torch.no_grad()
def test_a_position_table_is_not_read_beyond_its_end(triton):
    decoder = UncapturedDecoder(graph_network("opt", DEVICE), [[number % VOCAB for number in range(CONTEXT - 1)]])
    decoder.run_step()
    assert decoder.relative_error() < 1e-4
    assert decoder.run_step().isfinite().all()
    assert decoder.decoder.position.tolist() == [CONTEXT + 1]


@torch.no_grad()
def test_doubling_the_capacity_keeps_the_cache_and_extends_the_rotation_tables(triton):
    decoder = UncapturedDecoder(graph_network("llama-3.2-1b", DEVICE), [[5, 1, 2, 3], [6, 4, 7, 2]], capacity=5)
    decoder.run_step()
    decoder.decoder.capture = lambda: None
    decoder.decoder.double_capacity()
    decoder.run_step()
    assert decoder.relative_error() < 1e-4
    assert {(layer.keys.shape[2], len(layer.cosine)) for layer in decoder.decoder.layers} == {(10, 10)}


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt2"])
def test_layers_share_rotation_tables_and_num_bytes_counts_them_once(name):
    decoder = GraphDecoder(graph_network(name, DEVICE), 2, 8, choose_greedily)
    parts = [part for layer in decoder.layers for part in (layer.keys, layer.values, layer.cosine, layer.sine)]
    storages = {part.data_ptr(): part.nbytes for part in (*parts, *decoder.workspace)}
    assert decoder.num_bytes == sum(storages.values())


@torch.no_grad()
def test_a_prompt_that_fills_the_whole_cache_is_an_error():
    decoder = GraphDecoder(graph_network("llama-3.2-1b", DEVICE), 1, 4, choose_greedily)
    with pytest.raises(ClearheadError, match="has 4 tokens, but this decoder has a capacity of 4 including the next"):
        decoder.prefill([[1, 2, 3, 4]])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 20])  # the first two in Triton kernels, the last in PyTorch
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2", "opt"])
@torch.no_grad()
def test_packed_weights_give_the_logits_of_the_network_and_a_captured_step_the_same_tokens(name, bits, batch, triton):
    """The kernels round x to eight bits; PyTorch's products round nothing."""
    prompts = [[row, 1, 2, 3] for row in range(batch)]
    decoder = UncapturedDecoder(pack_network(graph_network(name, "cuda"), bits), prompts)
    chosen = decoder.run_step().argmax(-1).tolist()
    assert decoder.relative_error() < (0.04 if batch <= decoder.decoder.max_kernel_rows else 1e-4)
    decoder.decoder.start(decoder.decoder.prefill(prompts).argmax(-1))
    assert decoder.decoder.replay_step().tolist() == chosen


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "llama-4-scout", "qwen3-30b-a3b", "t5-small", "gpt1", "gpt3-125m", "bloom-7b1", "palm-8b"]
)
def test_an_unsupported_model_is_refused_with_the_reason(name):
    network = toy_network(name)
    reason = unsupported_network_reason(network, "cuda")
    with pytest.raises(ClearheadError, match=f"cannot run in a CUDA graph: {reason}"):
        GraphDecoder(network, 1, 16, choose_greedily)
