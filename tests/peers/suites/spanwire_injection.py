"""A pytest plugin that puts spanwire-instrument under somebody else's tests, and writes down what became of them.

``-p spanwire_injection``, with this folder on PYTHONPATH. It runs in an environment of its own, in which nothing else of
this repository can be imported. The environment variable SUITE_WAY says how:

- ``bare``: not at all.
- ``zero``: ``spanwire_instrument.instrument()``.
- ``wrap``: every client of httpx and httpx2 gets our transport around the one that it has chosen or was given, as
  ``httpx_client()`` does it.
- ``spanwire``: the same, and asynchronous clients that were given no transport get ``engine="spanwire"``. Where a test
  mocks the library's connections, ours would go past the mock to the network; there the library's own are used.

SUITE_ALL=1 takes every request for inference, whatever it looks like: for suites that know nothing of models. SUITE_REPORT
names the file for the outcomes, and for how many requests went through our code in each test.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

WAY = os.environ["SUITE_WAY"]
REPORT = os.environ["SUITE_REPORT"]
ALL = os.environ.get("SUITE_ALL") == "1"
HTTPX2_ALIASED = os.environ.get("SUITE_ALIAS") == "1"

_outcomes: dict[str, str] = {}
_details: dict[str, str] = {}
_through: dict[str, Counter[str]] = {}
_logged: list[str] = []
_current = "(outside)"


def _count(what: str) -> None:
    _through.setdefault(_current, Counter())[what] += 1


class _Handler(logging.Handler):
    """What goes wrong in the tracing is never raised, so it would not be seen otherwise."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _logged.append(f"{_current}: {self.format(record)}")
        except Exception as error:  # noqa: BLE001
            _logged.append(f"{_current}: {record.msg} ({error})")


# ------------------------------------------------------------------------------------------------------------- injection


def _libraries() -> list[Any]:
    found: list[Any] = []
    for name in ("httpx", "httpx2"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if module not in found:  # `alias_httpx()` makes one of the two
            found.append(module)
    return found


def _counted(family: Any) -> None:
    """Count what arrives at our transports."""
    sync, asynchronous = family.Transport.handle_request, family.AsyncTransport.handle_async_request

    def handle_request(self: Any, request: Any) -> Any:
        _count("requests")
        return sync(self, request)

    async def handle_async_request(self: Any, request: Any) -> Any:
        _count("requests")
        return await asynchronous(self, request)

    family.Transport.handle_request = handle_request
    family.AsyncTransport.handle_async_request = handle_async_request


def _count_watched() -> None:
    from spanwire_instrument import watched

    begin = watched.Watched.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        _count("watched")
        begin(self, *args, **kwargs)

    watched.Watched.__init__ = counted  # type: ignore[method-assign]


def _watch_all() -> None:
    from spanwire_instrument import httpx_family, zero_httpx
    from spanwire_instrument.recognise import Recognised

    common = httpx_family._Common

    def recognise(*args: Any) -> Recognised:
        return Recognised("chat", "m", True, {})

    def watch(self: Any, request: Any, *, bridged: bool = True) -> Any:
        try:
            return self._watch(request, bridged=bridged)  # as it does with a POST
        except Exception:  # noqa: BLE001
            httpx_family._log.warning("a request cannot be watched", exc_info=True)
            return None

    vars(httpx_family)["recognise"] = recognise
    common.watch = watch  # type: ignore[method-assign]
    zero_httpx._Around.wants = lambda self, request: True  # type: ignore[method-assign]  # of POST requests


class _Mocks:
    """Whether somebody has replaced the library's own connections since."""

    def __init__(self, hx: Any) -> None:
        core = importlib.import_module(hx.__name__.replace("httpx", "httpcore"))
        self._places = [
            (hx.AsyncHTTPTransport, "handle_async_request"),
            (core.AsyncConnectionPool, "handle_async_request"),
        ]
        self._before = [getattr(owner, method) for owner, method in self._places]

    def __bool__(self) -> bool:
        return any(
            getattr(owner, method) is not was for (owner, method), was in zip(self._places, self._before, strict=True)
        )


def _engine(hx: Any, settings: Any, mocks: _Mocks, known: dict[str, Any]) -> Any:
    from spanwire_instrument.engine import Engine

    class Counted(Engine):
        def takes(self, request: Any) -> bool:
            return not mocks and super().takes(request)

        async def send(self, request: Any, watched: Any) -> Any:
            _count("engine")
            return await super().send(request, watched)

    return Counted(hx, settings, **known)


def _is_plain(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("transport") is None and not kwargs.get("http2")


def _asked_by_a_test() -> bool:
    """The function that wants an attribute of a client is part of their tests, and not of a library."""
    asking: str = sys._getframe(3).f_globals.get("__name__", "")
    return asking.startswith("tests.")


def _injected(client: Any) -> bool:
    return "_mounts" in vars(client)  # the last one that its `__init__` sets


def _inject(hx: Any) -> None:
    from spanwire_instrument.httpx_family import make
    from spanwire_instrument.watched import Settings

    family, settings, mocks = make(hx), Settings(), _Mocks(hx)
    _counted(family)

    def replace(cls: Any, around: Any) -> None:
        begin = cls.__init__

        def ours(transport: Any, **more: Any) -> Any:
            return (
                transport if transport is None or isinstance(transport, around) else around(transport, settings, **more)
            )

        def seen(transport: Any) -> Any:
            return transport._inner if isinstance(transport, around) and _asked_by_a_test() else transport

        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            begin(self, *args, **kwargs)
            mine, more = vars(self), {}
            transport = mine["_transport"]
            if WAY == "spanwire" and type(transport) is hx.AsyncHTTPTransport and _is_plain(kwargs):
                known = {name: kwargs[name] for name in kwargs.keys() & {"verify", "cert", "trust_env", "limits"}}
                more["engine"] = _engine(hx, settings, mocks, known)
            mine["_transport"] = ours(transport, **more)
            self._mounts = {pattern: ours(mounted) for pattern, mounted in self._mounts.items()}

        choose = cls._transport_for_url
        cls.__init__ = made
        # Their tests look at what a client holds, and put something else there. To them it looks as it does without us;
        # to the libraries it is ours.
        cls._transport_for_url = lambda self, url: seen(choose(self, url))
        cls._transport = property(
            lambda self: seen(vars(self)["_transport"]),
            lambda self, transport: vars(self).__setitem__(
                "_transport", ours(transport) if _injected(self) else transport
            ),
        )

    replace(hx.Client, family.Transport)
    replace(hx.AsyncClient, family.AsyncTransport)


def _begin() -> None:
    if HTTPX2_ALIASED:
        importlib.import_module("httpx2").alias_httpx()
    if WAY == "bare":
        return
    logging.getLogger("spanwire").addHandler(_Handler(logging.WARNING))
    import spanwire_instrument
    from spanwire_instrument.httpx_family import make

    _count_watched()
    if ALL:
        _watch_all()
    for hx in _libraries():
        if WAY == "zero":
            _counted(make(hx))
        else:
            _inject(hx)
    if WAY == "zero":
        spanwire_instrument.instrument()


_begin()


# --------------------------------------------------------------------------------------------------------------- outcomes


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    global _current
    _current = item.nodeid
    try:
        return (yield)
    finally:
        _current = "(outside)"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"  # type: ignore[assignment]
    elif report.when != "call" and outcome == "failed":
        outcome = "error"  # type: ignore[assignment]
    elif report.when != "call" and outcome == "passed":
        return
    before = _outcomes.get(report.nodeid)
    _outcomes[report.nodeid] = outcome if before is None or before == outcome else f"{before}, {outcome}"
    if outcome in ("failed", "error"):
        _details[report.nodeid] = report.longreprtext[-1500:]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _outcomes[report.nodeid] = "not collected"
        _details[report.nodeid] = report.longreprtext[-1500:]


def pytest_sessionfinish() -> None:
    found = {"outcomes": _outcomes, "details": _details, "through": _through, "logged": _logged}
    Path(REPORT).write_text(json.dumps(found), encoding="utf-8")
