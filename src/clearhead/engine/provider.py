"""EngineProvider: the engine of a network, created when it is first needed and kept for later calls.

provider = EngineProvider(network); shared = provider.engine_for(requests)
"""

from collections.abc import Iterable
from threading import Lock

import torch

from clearhead.engine.engine import PAGE_SIZE, Engine
from clearhead.engine.memory import bytes_per_token, default_memory, free_memory
from clearhead.engine.request import Request
from clearhead.engine.shared import SharedEngine
from clearhead.model import Transformer


class EngineProvider:
    """Create an engine on first use, and another one when the network has moved or a request needs more pages."""

    def __init__(self, network: Transformer):
        self.network = network
        self._lock = Lock()
        self._shared: SharedEngine | None = None
        self._created_for: tuple[torch.dtype, torch.device] | None = None

    def has_room(self, requests: Iterable[Request]) -> bool:
        """Return whether the largest request would leave half of the free memory to other programs."""
        parameter = next(self.network.parameters())
        shared = self._shared
        if shared is not None and _longest(requests) <= shared.engine.capacity:
            return True
        return self._bytes_for(_longest(requests), parameter.dtype) <= free_memory(parameter.device) // 2

    def engine_for(self, requests: Iterable[Request]) -> SharedEngine:
        """Return an engine with room for each of these requests.

        Requests that run at the same time share the pages of a common prefix. Those of an earlier call are not used,
        because the weights may have changed since.
        """
        parameter = next(self.network.parameters())
        kind = parameter.dtype, parameter.device
        longest = _longest(requests)
        with self._lock:
            if self._shared is None or self._created_for != kind or self._shared.engine.capacity < longest:
                self._shared = None  # frees the pages of the old engine first
                memory = max(self._bytes_for(longest, parameter.dtype), default_memory(parameter.device))
                self._shared, self._created_for = SharedEngine(Engine(self.network, memory=memory)), kind
            elif not self._shared.engine.has_work:
                self._shared.engine.forget_prefixes()
            return self._shared

    def _bytes_for(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of the pages of one sequence."""
        num_tokens = -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
        return num_tokens * bytes_per_token(self.network.config.output_stack, dtype)


def _longest(requests: Iterable[Request]) -> int:
    """Return the number of tokens that the largest request may need room for."""
    return max(max(len(each.prompt) + each.options.max_new_tokens, len(each.source)) for each in requests)
