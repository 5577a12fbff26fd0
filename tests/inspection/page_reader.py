"""Parse a page as a browser does: elements with Python's HTML parser, arrays with NumPy."""

import base64
import json
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

    def array(self, reference):
        text = next(t for attributes, t in self.scripts if attributes.get("id") == f"array-{reference['array']}")
        numbers = np.frombuffer(base64.b64decode(text), np.dtype(reference["type"]).newbyteorder("<"))
        return numbers.reshape(reference["shape"])
