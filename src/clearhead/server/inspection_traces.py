"""TraceStore: the traces of the texts that were asked about last.

trace = TraceStore(model).get([1, 2, 3], source=[])
"""

from collections import OrderedDict
from collections.abc import Sequence

from clearhead.api import Model
from clearhead.inspection import Trace

_NUM_TRACES = 8
_MAX_RESIDUAL_BYTES = 1 << 27  # per trace


class TraceStore:
    """The last few traces of a model, by their token ids."""

    def __init__(self, model: Model):
        self._model = model
        self._traces: OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], Trace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def get(self, tokens: Sequence[int], source: Sequence[int]) -> Trace:
        """Return the trace of token ids, from the last ones if it is among them.

        A trace that is not too large keeps the residual stream at every depth, so that a question about all layers,
        such as the logit lens, does not repeat the forward pass.
        """
        key = tuple(tokens), tuple(source)
        if key in self._traces:
            self._traces.move_to_end(key)
            return self._traces[key]
        keeps_all = self._residual_bytes(len(tokens)) <= _MAX_RESIDUAL_BYTES
        traced = self._traces[key] = self._model.trace(list(tokens), list(source) or None, keep_residuals=keeps_all)
        if len(self._traces) > _NUM_TRACES:
            self._traces.popitem(last=False)
        return traced

    def _residual_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the residual stream at every depth."""
        config = self._model.config
        return len(config.output_stack.layers) * num_tokens * config.width * self._model.dtype.itemsize
