"""Studies: claims of the book as experiments that anyone can run and see.

    clearhead study mask --out studies/mask

catalog    names, titles and statements of all studies; no torch
study      Study, load_study, the runs with several seeds, and StudyResult
report     the files of a result: picture, table and page; a site of all results
pictures   matplotlib helpers: lines and bars with their spread over seeds
numbers    means, spreads and fitted power laws
toys       small networks, their training loop and a text

Every other module is one study of at most 150 lines on the public API, and therefore also an example of it:

mask, scale, heads, bottleneck, forget    attention, and the recurrent networks before it
order, nope, length                       positions
models, adapt, scaling                    architectures and training
cache, tables                             generation and cost

Names are imported on first use, so that a wrong name of a study is answered before torch is imported.
"""

from typing import TYPE_CHECKING

from clearhead.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from clearhead.studies.catalog import ENTRIES, Entry
    from clearhead.studies.pictures import check_can_draw, draw_picture
    from clearhead.studies.report import write_result, write_site
    from clearhead.studies.study import Study, StudyResult, load_study, run_study

__all__ = [
    "ENTRIES",
    "Entry",
    "Study",
    "StudyResult",
    "check_can_draw",
    "draw_picture",
    "load_study",
    "run_study",
    "write_result",
    "write_site",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "catalog": ["ENTRIES", "Entry"],
        "pictures": ["check_can_draw", "draw_picture"],
        "report": ["write_result", "write_site"],
        "study": ["Study", "StudyResult", "load_study", "run_study"],
    },
)
