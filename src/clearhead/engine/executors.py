"""Choose how a network runs in the engine.

executor = build_executor(network, pool, source_pool=None, max_sequences=256, deterministic=True)
"""

from clearhead.architecture import Bidirectional, ModelConfig, Rope
from clearhead.backends import has_independent_rows
from clearhead.cache import PagePool, PageStorage
from clearhead.engine.executor import Executor, ModuleExecutor
from clearhead.engine.graph_executor import GraphExecutor, can_run_in_graphs
from clearhead.engine.parallel_runner import Channel, LeadingRunner
from clearhead.engine.runner import Runner
from clearhead.engine.sampler import Sampler
from clearhead.model import Transformer


def build_executor(
    network: Transformer,
    pool: PagePool,
    source_pool: PagePool | None,
    max_sequences: int,
    deterministic: bool,
    channel: Channel | None = None,
) -> Executor:
    """Return the fastest executor for a network, with pages for its keys and values.

    deterministic: the fastest one whose results for a request do not depend on other requests, to the last bit.
    channel: sends every step to the processes that hold the other shards of the network; None: there are none.
    """
    parameter, stack = next(network.parameters()), network.config.output_stack
    kind = parameter.dtype, parameter.device
    storage = PageStorage.for_stack(stack, pool, *kind)
    source_storage = None if source_pool is None else PageStorage.for_sources(stack, source_pool, *kind)
    if not deterministic and channel is None and can_run_in_graphs(network):
        return GraphExecutor(network, storage, max_sequences, source_storage)
    rows_alone = deterministic and not is_deterministic_by_default(network, pool.page_size)
    if channel is None:
        runner = Runner(network, storage, source_storage, rows_alone, deterministic)
    else:
        runner = LeadingRunner(network, storage, source_storage, rows_alone, deterministic, channel)
        runner.announce_pages()
    return ModuleExecutor(runner, Sampler(network.config.vocab_size, parameter.device))


def is_deterministic_by_default(network: Transformer, page_size: int) -> bool:
    """Return whether the results of a request never depend on other requests: in the CPU kernels, at little cost.

    The sources of an encoder-decoder are then read one by one, as its targets are not.
    """
    return has_independent_rows(network, page_size)


def unsupported_by_engine(config: ModelConfig) -> str | None:
    """Return why the engine cannot run a model, or None if it can."""
    if config.decoder is None or config.head is None:
        return "it has no decoder with a head"
    if any(isinstance(layer.attention.pattern, Bidirectional) for layer in config.decoder.layers):
        return "bidirectional layers cannot be cached"
    positions = [layer.attention.position for layer in config.decoder.layers]
    if any(isinstance(position, Rope) and position.depends_on_length for position in positions):
        return "with dynamic scaling or LongRoPE, its rotations depend on the length of the whole text"
    return None
