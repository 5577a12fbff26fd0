"""The course: every statement of the book as a lesson, on one page, in the terminal or as data.

    clearhead book --out course.html

page                      the page; its text is in assets/*.toml, its markup in assets/*.html
statements, examples      the text of all lessons; all worked examples
attention_examples, head_examples, position_examples, block_examples, training_examples, generation_examples,
cost_examples             the worked examples of each part of the book
parts                     what an example consists of; its inputs; small attention layers in float64
panels                    parts of an example as HTML, in the terminal and as JSON
drawing, mathml           charts, pictures and formulas without a library
widgets, widget_html      sliders, whose states are all computed in advance
"""

from clearhead.course.page import book_page
from clearhead.course.panels import book_data, print_book

__all__ = ["book_data", "book_page", "print_book"]
