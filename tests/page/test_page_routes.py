"""The routes of the page: static files with their policy, JSON answers, and a bounded queue beside the event loop."""

import asyncio
import json
import re
import threading
from importlib.resources import files

import pytest

pytest.importorskip("starlette", reason="starlette, of the extra serve, is not installed")

from starlette.applications import Starlette

from clearhead.errors import ClearheadError
from clearhead.server import page_routes as module
from clearhead.server.api_errors import unavailable
from clearhead.server.page_routes import page_routes
from tests.page.models import HOSTILE, byte_model, call, call_async, hostile_model

BUNDLE = files("clearhead").joinpath("page")
ASSETS = sorted(file.name for file in BUNDLE.joinpath("assets").iterdir())


@pytest.fixture(scope="module")
def app():
    model = byte_model()
    return Starlette(routes=page_routes(lambda: (model, "toy")))


def test_the_page_and_its_files_are_served_with_a_strict_policy(app):
    for path in ("/", *(f"/assets/{name}" for name in ASSETS)):
        answer = call(app, "GET", path)
        assert answer.status == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = call(app, "GET", path, headers=[(b"if-none-match", answer.headers["etag"].encode())])
        assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("path", ["/assets/", "/assets/none.js", "/assets/../index.html", "/assets/%2e%2e/index.html"])
def test_nothing_else_is_served(app, path):
    assert call(app, "GET", path).status == 404


def test_the_bundle_is_small_and_loads_nothing_from_outside():
    contents = {name: BUNDLE.joinpath("assets", name).read_bytes() for name in ASSETS}
    contents["index.html"] = BUNDLE.joinpath("index.html").read_bytes()
    assert sum(map(len, contents.values())) < 1_000_000
    for name, content in contents.items():
        addresses = set(re.findall(rb"https?://[^\s\"'`)<]+", content)) - {b"http://www.w3.org/2000/svg"}
        assert addresses == set(), name


def test_no_script_makes_markup_of_data():
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|javascript:"
    )
    for name in ASSETS:
        if name.endswith(".js"):
            assert re.search(forbidden, BUNDLE.joinpath("assets", name).read_text(encoding="utf-8")) is None, name
    assert (
        re.search(r"<script(?! type=\"module\" src)|\bon\w+=|style=", BUNDLE.joinpath("index.html").read_text()) is None
    )


def test_every_import_and_link_of_the_bundle_exists():
    for name in ASSETS:
        if name.endswith(".js"):
            imported = re.findall(r'from "\./([^"]+)"', BUNDLE.joinpath("assets", name).read_text(encoding="utf-8"))
            assert set(imported) <= set(ASSETS), name
    linked = re.findall(r'"/assets/([^"]+)"', BUNDLE.joinpath("index.html").read_text(encoding="utf-8"))
    assert set(linked) <= set(ASSETS)


def test_the_bundled_examples_are_complete():
    examples = json.loads(BUNDLE.joinpath("assets", "examples.json").read_text(encoding="utf-8"))
    assert len(examples) == 3
    for example in examples:
        data = json.loads(BUNDLE.joinpath("assets", f"example-{example['name']}.json").read_text(encoding="utf-8"))
        layers = range(data["model"]["num_layers"])
        assert {f'thumbnails {{"view":0,"layer":{layer}}}' for layer in layers} <= data["answers"].keys()
        for step in example["steps"]:
            if step["view"] == "attention":
                head = f'head {{"view":0,"layer":{step["params"]["layer"]},"head":{step["params"]["head"]}}}'
                assert head in data["answers"]


def test_a_question_is_answered_in_json(app):
    answer = call(app, "POST", "/inspect/model", {})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.data["name"] == "toy"
    assert answer.data["num_layers"] == 3


def test_hostile_tokens_arrive_as_data():
    model = hostile_model()
    app = Starlette(routes=page_routes(lambda: (model, "toy")))
    answer = call(app, "POST", "/inspect/encode", {"tokens": [model.tokenizer.unknown_id]})
    assert answer.headers["content-type"] == "application/json"
    assert answer.data["tokens"][0]["text"] == HOSTILE


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b'{"tokens": [NaN]}', 400),
        (b"[" * 100_000, 400),
        (b" " * (5 << 20), 413),
    ],
)
def test_wrong_bodies_are_refused(app, body, status):
    answer = call(app, "POST", "/inspect/trace", body)
    assert answer.status == status
    assert answer.data["error"]["message"]


def test_answers_while_the_model_is_being_loaded():
    def loading():
        raise unavailable("the model is still being loaded")

    app = Starlette(routes=page_routes(loading))
    assert call(app, "GET", "/").status == 200
    assert call(app, "POST", "/inspect/model", {}).status == 503


def test_questions_run_beside_the_event_loop_one_at_a_time_and_too_many_are_refused(monkeypatch):
    release, running = threading.Event(), []

    def answer(inspector, question, body):
        running.append(threading.current_thread().name)
        release.wait(10)
        return {}

    monkeypatch.setattr(module.Inspector, "answer", answer)
    model = byte_model()
    app = Starlette(routes=page_routes(lambda: (model, "toy")))

    async def ask_many():
        tasks = [
            asyncio.ensure_future(call_async(app, "POST", "/inspect/model")) for _ in range(module._MAX_WAITING + 3)
        ]
        while not running:
            await asyncio.sleep(0.01)  # the event loop is free while a question is being answered
        assert len(running) == 1
        release.set()
        return [answer.status for answer in await asyncio.gather(*tasks)]

    statuses = asyncio.run(ask_many())
    assert sorted(statuses) == [200] * module._MAX_WAITING + [503] * 3
    assert all(name.startswith("clearhead-apart") for name in running)


def test_a_question_is_not_computed_if_its_client_has_gone(monkeypatch):
    release, asked = threading.Event(), []

    def answer(inspector, question, body):
        asked.append(body)
        release.wait(10)
        return {}

    monkeypatch.setattr(module.Inspector, "answer", answer)
    model = byte_model()
    app = Starlette(routes=page_routes(lambda: (model, "toy")))

    async def leave():
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"second": 1}', "more_body": False}]

        async def receive():
            return messages.pop()

        first = asyncio.ensure_future(call_async(app, "POST", "/inspect/model", b'{"first": 1}'))
        while not asked:
            await asyncio.sleep(0.01)
        second = await call_async(app, "POST", "/inspect/model", receive=receive)
        release.set()
        await first
        return second.status

    assert asyncio.run(leave()) == 499
    assert asked == [{"first": 1}]


def test_errors_of_the_model_are_answered_with_400(app, monkeypatch):
    def answer(inspector, question, body):
        raise ClearheadError("the weights of this model are packed")

    monkeypatch.setattr(module.Inspector, "answer", answer)
    answered = call(app, "POST", "/inspect/model", {})
    assert answered.status == 400
    assert answered.data["error"]["type"] == "invalid_request_error"
