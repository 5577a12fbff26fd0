"""A page as a browser takes it apart: elements by Python's parser, numbers by numpy."""

import base64
import json
from html.parser import HTMLParser

import numpy as np


class PageReader(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self.policy, self.title, self.styles = [], [], "", "", ""
        self.inside = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.inside = tag
        if tag == "script":
            self.scripts.append((attributes, ""))
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, text):
        if self.inside == "script":
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + text)
        elif self.inside == "title":
            self.title += text
        elif self.inside == "style":
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
