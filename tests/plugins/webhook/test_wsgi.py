"""The receiver behind wsgiref, the standard library's server."""

from __future__ import annotations

import http.client
import io
import threading
import wsgiref.simple_server
import wsgiref.validate
from collections.abc import Iterator
from typing import Any

import pytest
from spanwire_webhook.receiver import Receiver
from spanwire_webhook.settings import ReceiverSettings
from spanwire_webhook.wsgi import WebhookWSGI

from .fakes import SETTINGS, Yard, said, signed, signed_now


class _Quiet(wsgiref.simple_server.WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def yard() -> Iterator[Yard]:
    made = Yard()
    yield made
    made.close()


def test_over_a_socket(yard: Yard) -> None:
    app = WebhookWSGI(Receiver(yard.store, yard.codecs, SETTINGS))
    server = wsgiref.simple_server.make_server("127.0.0.1", 0, wsgiref.validate.validator(app), handler_class=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    body = said(text="x" * 200_000)
    statuses = []
    for path, data in ((yard.path("generic"), body), (yard.path("generic"), body + b" "), ("/x", b"")):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request("POST", path, data, dict(signed_now(body)))
        statuses.append(connection.getresponse().status)
        connection.close()
    server.shutdown()
    thread.join()
    server.server_close()
    app.close()
    assert statuses == [204, 401, 404]
    assert yard.inbox()[0].body == body


def call(app: WebhookWSGI, environ: dict[str, Any]) -> str:
    started: list[str] = []
    b"".join(app(environ, lambda status, _: started.append(status)))
    return started[0]


def test_a_body_that_ends_early_or_has_no_length(yard: Yard) -> None:
    app = WebhookWSGI(yard.receiver)
    body = said()
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": yard.path("generic"),
        **{f"HTTP_{name.upper().replace('-', '_')}": value for name, value in signed(body)},
    }
    cut = {**environ, "wsgi.input": io.BytesIO(body[:-1]), "CONTENT_LENGTH": str(len(body))}
    assert call(app, cut).startswith("408")
    assert call(app, {**cut, "wsgi.input": io.BytesIO(body[:-1]), "wsgi.input_terminated": True}).startswith("408")
    assert (yard.inbox(), yard.count("disconnected")) == ([], 2)
    chunked = {**environ, "wsgi.input": io.BytesIO(body), "wsgi.input_terminated": True}
    assert call(app, chunked).startswith("204")
    assert call(app, {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}).startswith("200")
    app.close()


def test_two_lines_that_wsgi_has_joined_are_not_believed(yard: Yard) -> None:
    app = WebhookWSGI(yard.receiver)
    body = said()
    environ = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in signed(body)}
    environ["HTTP_WEBHOOK_TIMESTAMP"] += "," + environ["HTTP_WEBHOOK_TIMESTAMP"]
    more = {"REQUEST_METHOD": "POST", "PATH_INFO": yard.path("generic"), "CONTENT_LENGTH": str(len(body))}
    assert call(app, {**environ, **more, "wsgi.input": io.BytesIO(body)}).startswith("401")
    app.close()


def test_too_large(yard: Yard) -> None:
    yard.again(ReceiverSettings(secrets=SETTINGS.secrets, body_limit_bytes=10))
    app = WebhookWSGI(yard.receiver)
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": yard.path("generic"), "CONTENT_LENGTH": "11"}
    assert call(app, {**environ, "wsgi.input": io.BytesIO(b"x" * 11)}).startswith("413")
    app.close()
