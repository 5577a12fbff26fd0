"""Parse a page as a browser does: elements with Python's HTML parser, arrays with NumPy."""

import base64
import json
import zlib
from functools import cached_property
from html.parser import HTMLParser

import numpy as np


class PageReader(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self.policy, self.title, self.styles = [], [], "", "", ""
        self.open_tag = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.open_tag = tag
        if tag == "script":
            self.scripts.append((attributes, ""))
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]

    def handle_endtag(self, tag):
        self.open_tag = None

    def handle_data(self, text):
        if self.open_tag == "script":
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + text)
        elif self.open_tag == "title":
            self.title += text
        elif self.open_tag == "style":
            self.styles += text

    @property
    def data(self):
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "data"))

    @property
    def program(self):
        return next(text for attributes, text in self.scripts if not attributes)

    @cached_property
    def block(self):
        text = next(text for attributes, text in self.scripts if attributes.get("id") == "arrays")
        return zlib.decompress(base64.b64decode(text))

    def array(self, reference):
        dtype = np.dtype(reference["type"]).newbyteorder("<")
        count = int(np.prod(reference["shape"]))
        return np.frombuffer(self.block, dtype, count, reference["offset"]).reshape(reference["shape"])

    def weights(self, view, layer, head):
        """Return the weights (T, S) of a head: square roots relative to the largest weight of a row, where allowed."""
        entry = view["layers"][layer]
        place = entry["full"].index(head)
        allowed = np.ones((len(view["rows"]), len(view["columns"])), dtype=bool)
        if entry["allowed"] is not None:
            allowed = self.array(entry["allowed"]).astype(bool)
        roots = np.zeros(allowed.shape)
        roots[allowed] = self.array(entry["weights"])[place] / 254
        return self.array(entry["maxima"])[place][:, None] / 65535 * roots**2

    def scores(self, view, layer, head):
        """Return the scores (T, S) of a head, which are stored linearly between the smallest and the largest."""
        entry = view["layers"][layer]
        place = entry["full"].index(head)
        low, high = self.array(entry["ranges"])[place].astype(float)
        return low + (high - low) * self.array(entry["scores"])[place] / 254


def assert_weights_are_rounded(shown, exact):
    """Assert that the error is at most 0.4 % of the largest weight of a row, as the page says."""
    assert (abs(shown - exact) <= 0.004 * exact.max(axis=1, keepdims=True) + 1e-4).all()


def assert_scores_are_rounded(shown, exact):
    """Assert that the error is at most 0.2 % of the range of the head, as the page says."""
    assert (abs(shown - exact) <= 0.002 * (exact.max() - exact.min()) + 1e-6).all()
