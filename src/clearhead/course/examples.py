"""All worked examples of the book, in its order.

for example in worked_examples(): print(example.number, example.title)
"""

import torch

from clearhead.course.attention_examples import attention_examples
from clearhead.course.block_examples import block_examples
from clearhead.course.cost_examples import cost_examples
from clearhead.course.generation_examples import generation_examples
from clearhead.course.head_examples import head_examples
from clearhead.course.parts import Example
from clearhead.course.position_examples import position_examples
from clearhead.course.training_examples import training_examples


@torch.no_grad()
def worked_examples() -> list[Example]:
    """Compute all examples."""
    return [
        *attention_examples(),
        *head_examples(),
        *position_examples(),
        *block_examples(),
        *training_examples(),
        *generation_examples(),
        *cost_examples(),
    ]
