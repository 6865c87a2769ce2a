"""Inside the program: instruments it, and writes a line for everything that the doctor wants to know.

A line is written when it happens, by opening and closing the file: a program that crashes or is killed, that forks, or
that closes all files which it does not know, loses none of them and gets none into a file of its own. Content, headers and
arguments are in no line.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from spanwire.timeline import Timeline
from spanwire.witness import Witness

from .. import instrument
from . import probes
from .sites import Clients, Site, find

__all__ = ["Recorder", "start"]

_log = logging.getLogger("spanwire.instrument")


class Recorder:
    """The events of this process, appended to one file of all processes.

    Args:
        folder: the doctor's. When it is gone, nothing is recorded any more.
    """

    def __init__(self, folder: str) -> None:
        self._path = str(Path(folder) / "events.jsonl")
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._running: dict[int, _Call] = {}
        self.clients = Clients()

    def write(self, event: str, site: Site | None = None, **fields: Any) -> None:
        """Append a line. Never raises."""
        line: dict[str, Any] = {"e": event, "pid": os.getpid(), "t": time.time(), **fields}
        if site is not None:
            line["site"] = list(site)
        try:
            data = json.dumps(line).encode() + b"\n"
            # No O_CREAT: after the doctor has gone there is no file, and there shall be none.
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
            try:
                os.write(fd, data)
            finally:
                os.close(fd)
        except (OSError, ValueError, TypeError):
            pass

    def started(self) -> None:
        """This process records."""
        self.write("start", ppid=os.getppid(), python=sys.executable)

    # --- calls ------------------------------------------------------------------------------------------------------

    def begin(self, site: Site, model: str, endpoint: str) -> _Call:
        """A call begins."""
        call = _Call(next(self._ids), site, self.clients.sending())
        with self._lock:
            if self._running:
                call.alone = False
                for other in self._running.values():
                    other.alone = False
            self._running[call.id] = call
        self.write("begin", site, id=call.id, model=model, endpoint=endpoint)
        call.cpu_ns = time.process_time_ns()
        return call

    def end(self, call: _Call, timeline: Timeline) -> None:
        """It has ended."""
        cpu_ns = time.process_time_ns() - call.cpu_ns
        with self._lock:
            self._running.pop(call.id, None)
        more = {"cpu_s": cpu_ns / 1e9} if call.alone else {}
        self.write("call", call.site, id=call.id, client=call.client, timeline=timeline.to_dict(), **more)

    def after_fork(self) -> None:
        """In the child: the parent's calls are the parent's."""
        self._lock = threading.Lock()
        self._running = {}
        self.started()


class _Call:
    __slots__ = ("alone", "client", "cpu_ns", "id", "site")

    def __init__(self, id: int, site: Site, client: int) -> None:
        self.id = id
        self.site = site
        self.client = client
        self.alone = True
        self.cpu_ns = 0


class _Observed:
    """A registry of plugins whose observers hear of one call, and so does the recorder. All else is the registry's."""

    has_observers = True

    def __init__(self, registry: Any, recorder: Recorder, call: _Call) -> None:
        self._registry = registry
        self._recorder = recorder
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def observe(self, timeline: Timeline) -> None:
        if self._registry.has_observers:
            self._registry.observe(timeline)
        self._recorder.end(self._call, timeline)


def _watch_calls(recorder: Recorder) -> None:
    """Every call that is watched in this process from here on is recorded, with its site."""
    begin = Witness.begin

    def begin_recorded(endpoint: Any, **fields: Any) -> Witness:
        call = None
        try:
            site = find(2)
            registry = fields.get("registry")
            if registry is None:
                from spanwire.manager import default_manager

                registry = default_manager().registry
            call = recorder.begin(site, str(fields.get("model", "")), endpoint.address)
            fields["registry"] = _Observed(registry, recorder, call)
        except Exception:  # noqa: BLE001 - the program goes on without us
            _log.debug("a call is not recorded", exc_info=True)
        return begin(endpoint, **fields)

    Witness.begin = staticmethod(begin_recorded)  # type: ignore[method-assign]


_recorder: Recorder | None = None


def start(folder: str) -> None:
    """Instrument this process, and record. Only once."""
    global _recorder
    if _recorder is not None:
        return
    recorder = _recorder = Recorder(folder)

    _watch_calls(recorder)
    # As the program is, not as it would be with us: streams that lose their connection have to be seen.
    instrument(drain=False)
    probes.install(recorder)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=recorder.after_fork)
    recorder.started()
