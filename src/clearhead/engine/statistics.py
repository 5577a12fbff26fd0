"""EngineStatistics: how busy an engine is. Reading it is safe from any thread.

engine.statistics.num_waiting
"""

from typing import NamedTuple


class EngineStatistics(NamedTuple):
    """The state of an engine now, and its counts since it was created.

    num_used_pages: pages that running requests hold. num_cached_pages: pages that no request holds, kept for later
    requests with the same prefix until their space is needed. num_prompt_tokens: of all requests that have started;
    num_cached_tokens: those of them that were not computed. num_preemptions: how often a request lost its pages to an
    older one. num_drafted_tokens: guesses of drafters; num_accepted_tokens: those that were right.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_used_pages: int
    num_cached_pages: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
