"""Look inside a model: trace a forward pass, measure and change what it does, and display it.

    from clearhead.inspection import induction_scores; induction_scores(model.trace("A B C. A B"))[3]

Trace:

    tracing, recurrent   record a trace of a text, of a generation, of a training batch, or of the recurrent baseline
    trace                Trace: a record, and what is computed from it on request
    trace_record         the recorded tokens and residual streams; trace_file: the same as a safetensors file
    recording, replay    run a network and record its residual stream; recompute one block
    attention_heads      queries, keys and values of a layer, and the scores and weights of chosen heads

Analyze:

    lens                 the logit lens; lens_table: its predictions
    attention_patterns   entropy, previous-token, induction and specific scores, attention rollout
    shares               how much of a head follows trivial patterns; head_ranking: the most specific heads first
    attribution          a logit as a sum over the parts of the network
    token_probabilities  the probability of each token of a text
    ablation, patching   remove or replace an activation; effect: how the prediction changes
    intervention         a copy of the network with one activation changed
    hook_points          points inside a network by the names of TransformerLens; hooked_run: read or change the values
                         there; activation_cache: what was read

Display:

    views                the attention matrices to display
    heatmap, png, page   in the terminal, as a picture, as an HTML page; notebook: the page in a frame
    page_data            what a page contains (rounded_matrices: in 8 bits); document, assets: the file around it
    colors, token_labels what these have in common
    export               choose among them by file extension; JSON data
"""

from clearhead.inspection import colors
from clearhead.inspection.ablation import ablate, ablate_parts
from clearhead.inspection.activation_cache import ActivationCache
from clearhead.inspection.attention_patterns import (
    attention_entropy,
    attention_rollout,
    induction_scores,
    previous_token_scores,
    specific_scores,
)
from clearhead.inspection.attribution import Attribution, Contribution, attribute_logit
from clearhead.inspection.document import html_document
from clearhead.inspection.effect import Effect, most_likely
from clearhead.inspection.export import (
    check_export_path,
    export_trace,
    num_lens_tokens,
    print_heatmap,
    print_lens,
    trace_data,
)
from clearhead.inspection.head_ranking import HeadSelection
from clearhead.inspection.hooked_run import Hook, HookPoint, NameFilter, run_with_cache, run_with_hooks
from clearhead.inspection.lens import logit_lens, make_lens_table
from clearhead.inspection.lens_table import LensPrediction
from clearhead.inspection.page_data import thumbnails
from clearhead.inspection.patching import patch, patch_grid
from clearhead.inspection.png import draw_matrix
from clearhead.inspection.recurrent import RecurrentTrace, trace_recurrent
from clearhead.inspection.shares import attention_shares
from clearhead.inspection.token_probabilities import score_tokens
from clearhead.inspection.trace import Trace
from clearhead.inspection.tracing import trace_batch, trace_generation, trace_text

__all__ = [
    "ActivationCache",
    "Attribution",
    "Contribution",
    "Effect",
    "HeadSelection",
    "Hook",
    "HookPoint",
    "LensPrediction",
    "NameFilter",
    "RecurrentTrace",
    "Trace",
    "ablate",
    "ablate_parts",
    "attention_entropy",
    "attention_rollout",
    "attention_shares",
    "attribute_logit",
    "check_export_path",
    "colors",
    "draw_matrix",
    "export_trace",
    "html_document",
    "induction_scores",
    "logit_lens",
    "make_lens_table",
    "most_likely",
    "num_lens_tokens",
    "patch",
    "patch_grid",
    "previous_token_scores",
    "print_heatmap",
    "print_lens",
    "run_with_cache",
    "run_with_hooks",
    "score_tokens",
    "specific_scores",
    "thumbnails",
    "trace_batch",
    "trace_data",
    "trace_generation",
    "trace_recurrent",
    "trace_text",
]
