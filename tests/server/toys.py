"""Toy models behind a real server on a free port, which all tests of a file share."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx2
import uvicorn

from clearhead.api import Model
from clearhead.server import Limits, ServerSettings, ServerState, Service, create_app
from clearhead.server.protocol import limited_protocol
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.tiny import tiny_network

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
NAME = "toy"
LETTERS = {str(token): 50 for token in range(ord("a"), ord("z") + 1)}  # a bias under which only letters are likely
CHAT = [{"role": "user", "content": "Hello"}]


class TemplateTokenizer:
    """A byte tokenizer with a chat template."""

    def __init__(self, template=TEMPLATE):
        self.inner = byte_tokenizer()
        self.chat_template = template

    def __getattr__(self, name):
        return getattr(self.inner, name)


def toy_model(**changes):
    tokenizer = TemplateTokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size, **({"context": 256} | changes)), tokenizer)


class Server:
    """A server in a thread. `post` and `get` return answers; `events` the data of a stream."""

    def __init__(self, url, state):
        self.url, self.state = url, state
        self.client = httpx2.Client(base_url=url, timeout=120, limits=httpx2.Limits(max_connections=None))

    @property
    def service(self):
        return self.state.service

    def get(self, path, **options):
        return self.client.get(path, **options)

    def post(self, path, body, **options):
        return self.client.post(path, json=body, **options)

    def complete(self, prompt="Hello", **fields):
        """Return the answer to a completion of letters."""
        answer = self.post("/v1/completions", {"prompt": prompt, "logit_bias": LETTERS, "max_tokens": 8, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, prompt="Hello", **fields):
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def chat(self, messages=CHAT, **fields):
        body = {"messages": messages, "logit_bias": LETTERS, "max_tokens": 8, **fields}
        answer = self.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path, body):
        """Return the JSON data of all events of a stream; the stream must end as it should."""
        answer = self.post(path, {"stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("\n\n")
        blocks = answer.text.removesuffix("\n\n").split("\n\n")
        data = [line.removeprefix("data: ") for block in blocks for line in block.split("\n") if line[:5] == "data:"]
        if path != "/v1/responses":
            assert data.pop() == "[DONE]"
        return [json.loads(each) for each in data]

    def wait_until_idle(self, seconds=60.0):
        """Wait until nothing is running, and check that nothing is left. The machine may be busy."""
        deadline = time.monotonic() + seconds
        service = self.service
        while time.monotonic() < deadline:
            now = service.statistics
            if now.num_running == now.num_waiting == service.admission.num_texts == service.admission.num_requests == 0:
                break
            time.sleep(0.01)
        now = service.statistics
        assert (now.num_running, now.num_waiting, now.num_used_pages) == (0, 0, 0)
        assert (service.admission.num_texts, service.admission.num_tokens, service.admission.num_requests) == (0, 0, 0)


@contextmanager
def serve(model, limits=None, names=(NAME, "alias"), loads=True, **settings):
    """Serve a model on a free port; with loads=False, never finish loading it."""
    settings = ServerSettings(port=0, limits=limits or Limits(), **settings)
    state, app, started = ServerState(settings), None, threading.Event()
    app = create_app(state)
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sends at once only if this is named
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=limited_protocol(settings.limits), ws="none", lifespan="off", log_config=None, timeout_keep_alive=30
    )
    server = uvicorn.Server(config)

    async def run():
        if loads:
            loop = asyncio.get_running_loop()
            service = await asyncio.to_thread(Service, model, names, settings, state.metrics, loop)
            state.serve(service)
        started.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(60), "the server did not start"
    running = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", state)
    try:
        yield running
    finally:
        running.client.close()
        server.should_exit = True
        server.force_exit = True
        thread.join(30)
        if state.service is not None:
            state.service.close()
