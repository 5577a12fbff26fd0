"""What the engine tells the caller of a request: about its prompt, and about errors.

event = Event(request_id, token, prompt=prompt_report(sequence))
"""

from clearhead.engine.prompt_scores import joined_scores
from clearhead.engine.request import PromptReport
from clearhead.engine.sequence import EngineSequence
from clearhead.errors import ClearheadError, out_of_memory_message

NOT_FINITE = (
    "the network's logits are not finite, because its weights are damaged or its dtype is too narrow for them; "
    "load the model in float32"
)


def prompt_report(sequence: EngineSequence) -> PromptReport | None:
    """Return what is known of a prompt, if the sequence has just got its first token or needs none."""
    if len(sequence.output) > 1:
        return None
    return PromptReport(sequence.num_cached or 0, joined_scores(sequence))


def advance_filter(sequence: EngineSequence, token: int) -> str | None:
    """Tell the filter of a sequence which token was chosen. Return an error if it fails."""
    if sequence.request.token_filter is None:
        return None
    try:
        sequence.request.token_filter.accept(token)
    except Exception as error:
        return f"the token filter of this request failed with {type(error).__name__}: {error}"
    return None


def describe_error(error: Exception) -> str:
    """Return one sentence for the caller of a request whose computation failed."""
    if isinstance(error, ClearheadError):
        return str(error)
    return out_of_memory_message(error) or f"computing this request failed with {type(error).__name__}: {error}"
