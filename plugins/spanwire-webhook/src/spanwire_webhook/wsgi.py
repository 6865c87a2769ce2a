"""The receiver as a WSGI application, for Flask, Django and others that serve in threads.

::

    application = DispatcherMiddleware(app, {"/hooks": WebhookWSGI(receiver)})

The server has to hand over bodies as they come; one that is chunked needs ``wsgi.input_terminated``, as gunicorn sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from .committer import Committer
from .receiver import Answer, Receiver

__all__ = ["WebhookWSGI"]

_PIECE_BYTES = 64 * 1024
#: The two headers that CGI, and so WSGI, has without HTTP_.
_UNPREFIXED = ("CONTENT_TYPE", "CONTENT_LENGTH")


class WebhookWSGI:
    """A WSGI application over a :class:`~spanwire_webhook.receiver.Receiver`.

    Args:
        receiver: what it does.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._committer = Committer(receiver)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer = self._answer(environ)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
        if answer.status != 204:
            headers.append(("content-length", str(len(answer.body))))
            if not answer.body:
                headers.append(("content-type", "text/plain"))  # PEP 3333's validator asks for one
        start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", headers)
        return [answer.body]

    def close(self) -> None:
        """What was begun is stored. Blocks."""
        self._committer.close()

    def _answer(self, environ: dict[str, Any]) -> Answer:
        path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace")  # PEP 3333: bytes as latin-1
        reception = self.receiver.begin(environ["REQUEST_METHOD"], path, _headers(environ))
        try:
            length = environ.get("CONTENT_LENGTH") or ""
            ends = bool(environ.get("wsgi.input_terminated"))
            left = int(length) if length.isascii() and length.isdigit() else 0
            while reception.reads and (ends or left):
                try:
                    piece = environ["wsgi.input"].read(_PIECE_BYTES if ends else min(left, _PIECE_BYTES))
                except OSError:
                    return reception.give_up("disconnected")
                if not piece:
                    if left > 0 and not ends:
                        return reception.give_up("disconnected")
                    break
                left -= len(piece)
                reception.feed(piece)
            if ends and length and left > 0 and reception.reads:
                return reception.give_up("disconnected")
            if reception.wants_keys():
                reception.reload_keys()
            return self._committer.finish(reception)
        except BaseException:
            reception.abandon()
            raise


def _headers(environ: dict[str, Any]) -> list[tuple[str, str]]:
    """WSGI joins two lines of one name with a comma: no verifier of ours takes that for one value."""
    found = [(name[5:].replace("_", "-").lower(), value) for name, value in environ.items() if name.startswith("HTTP_")]
    found += [(name.replace("_", "-").lower(), environ[name]) for name in _UNPREFIXED if environ.get(name)]
    return found
