"""EngineProvider: the engine of a network, created when it is first needed and kept for later calls.

provider = EngineProvider(network); shared = provider.engine_for(requests)
"""

from collections.abc import Collection
from threading import Lock

from clearhead.engine.engine import MAX_SEQUENCES, PAGE_SIZE, Engine
from clearhead.engine.executors import is_deterministic_by_default
from clearhead.engine.graph_executor import can_run_in_graphs
from clearhead.engine.memory import bytes_per_token, default_memory, free_memory
from clearhead.engine.request import Request
from clearhead.engine.shared import SharedEngine
from clearhead.model import Transformer

_SMALLEST = 2**28  # bytes of keys and values that an engine on a GPU gets at least


class EngineProvider:
    """Create an engine on first use, and another one when the network has changed or requests need more pages."""

    def __init__(self, network: Transformer):
        self.network = network
        self._lock = Lock()
        self._shared: SharedEngine | None = None
        self._created_for: tuple[object, ...] = ()  # the state of the network

    @property
    def runs_in_graphs(self) -> bool:
        """Whether the engine runs in CUDA graphs, which are the fastest way to generate even a single text."""
        return can_run_in_graphs(self.network)

    def has_room(self, requests: Collection[Request]) -> bool:
        """Return whether the largest request would leave half of the free memory to other programs."""
        shared = self._shared
        if shared is not None and _longest(requests) <= shared.engine.capacity:
            return True
        return self._bytes_for([_longest(requests)]) <= free_memory(self.network.device) // 2

    def engine_for(self, requests: Collection[Request], deterministic: bool | None = None) -> SharedEngine:
        """Return an engine with room for each of these requests. deterministic: as for Engine.

        Requests that run at the same time share the pages of a common prefix. Those of an earlier call are not used,
        because the weights may have changed since.
        """
        with self._lock:
            shared = self._shared
            if (
                shared is None
                or self._created_for != self._state(deterministic)
                or not self._is_large_enough(shared, requests)
            ):
                self._shared = shared = None  # frees the pages of the old engine first
                memory = self._memory(requests)
                self._shared = shared = SharedEngine(Engine(self.network, memory=memory, deterministic=deterministic))
                self._created_for = self._state(deterministic)  # after the kernels have merged weights
            elif shared.engine.is_idle:
                shared.engine.forget_prefixes()
            return shared

    def _state(self, deterministic: bool | None) -> tuple[object, ...]:
        """Return what an engine depends on: its executor reads these very tensors, on their device."""
        parameters = list(self.network.parameters())
        if is_deterministic_by_default(self.network, PAGE_SIZE):
            deterministic = True
        return (
            bool(deterministic),
            self.runs_in_graphs,
            *((each.data_ptr(), each.dtype, each.device) for each in parameters),
        )

    def _is_large_enough(self, shared: SharedEngine, requests: Collection[Request]) -> bool:
        """Return whether an engine has room for the largest request and, if it is idle, for as many as could run."""
        if shared.engine.capacity < _longest(requests):
            return False
        is_fixed = self.network.device.type != "cuda" or not shared.engine.is_idle  # on a CPU, pages are plentiful
        return is_fixed or shared.engine.capacity >= self._capacity_for(self._memory(requests))

    def _capacity_for(self, memory: int) -> int:
        """Return the number of tokens in the whole pages that fit into this many bytes."""
        return memory // (PAGE_SIZE * self._bytes_for_token) * PAGE_SIZE

    def _memory(self, requests: Collection[Request]) -> int:
        """Return the bytes of an engine for these requests.

        On a CPU this is the default, since unused pages take no memory. On a GPU it is what the requests need together,
        up to the default, because others share its memory.
        """
        longest, device = self._bytes_for([_longest(requests)]), self.network.device
        if device.type != "cuda":
            return max(longest, default_memory(device))
        largest = sorted((_num_tokens(request) for request in requests), reverse=True)[:MAX_SEQUENCES]
        occupied = 0 if self._shared is None else self._shared.engine.capacity * self._bytes_for_token
        return max(longest, min(max(self._bytes_for(largest), _SMALLEST), default_memory(device) + occupied))

    @property
    def _bytes_for_token(self) -> int:
        dtype = next(self.network.parameters()).dtype
        return bytes_per_token(self.network.config.output_stack, dtype)

    def _bytes_for(self, lengths: Collection[int]) -> int:
        """Return the bytes of the pages of sequences, each with a page more than it needs."""
        return sum(-(-length // PAGE_SIZE) + 1 for length in lengths) * PAGE_SIZE * self._bytes_for_token


def _num_tokens(request: Request) -> int:
    """Return the number of tokens that a request may need room for."""
    return max(len(request.prompt) + request.options.max_new_tokens, len(request.source))


def _longest(requests: Collection[Request]) -> int:
    return max(map(_num_tokens, requests))
