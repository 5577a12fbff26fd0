"""Small models for tests of the page, and a client that calls an ASGI app without sockets."""

import asyncio
import base64
import json

import numpy as np

from clearhead.api import Model, create
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.library_tokenizer import SpecialTokens
from tests.checkpoint.tiny import tiny_config
from tests.model.toys import toy, translator

HOSTILE = "<img src=x onerror=alert(1)>"
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"


def byte_model(layers=3, context=256, special=None):
    """Return a decoder of bytes with a chat template and random weights."""
    tokenizer = byte_tokenizer(special)
    tokenizer.chat_template = TEMPLATE
    config = tiny_config(vocab_size=tokenizer.vocab_size, num_layers=layers, context=context)
    return create(config, tokenizer, seed=3)


def hostile_model():
    """Return a model with a token that would run a script if it became markup."""
    return byte_model(context=4096, special=SpecialTokens(eos="<|endoftext|>", unknown=HOSTILE))


def translation_model():
    """Return an encoder-decoder without a tokenizer."""
    return Model(toy(translator()).float())


def array(data):
    """Return the array of {"type", "shape", "data"}."""
    content = base64.b64decode(data["data"])
    return np.frombuffer(content, dtype=data["type"]).reshape(data["shape"])


class Answered:
    """The answer of an ASGI app."""

    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def data(self):
        return json.loads(self.body)


async def call_async(app, method, path, body=b"", headers=(), receive=None):
    """Send a request to an ASGI app and return the answer."""
    sent, incoming = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def default_receive():
        if incoming:
            return incoming.pop()
        return await asyncio.Event().wait()  # the client stays

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "state": {},
        "headers": [(b"host", b"127.0.0.1"), *headers],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive or default_receive, send)
    start = sent[0]
    found = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return Answered(start["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


def call(app, method, path, data=None, headers=()):
    """Send JSON to an ASGI app and return the answer."""
    body = b"" if data is None else data if isinstance(data, bytes) else json.dumps(data).encode()
    return asyncio.run(call_async(app, method, path, body, headers))
