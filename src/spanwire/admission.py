"""Limits on calls at once: a PURE decision, and its thin shell for waiting.

:class:`Admission` decides, without clock or loop: admit, wait, or refuse; first come, first served. :class:`Slots` lets
coroutines of any loop and thread of the process wait for that decision. :func:`slots_for` shares one ``Slots`` between
all endpoint objects with equal address and limits, so that a limit holds for the process and not for the object.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Literal
from weakref import WeakValueDictionary

from .endpoint import Endpoint, Limits
from .errors import QueueFull, QueueTimeout

__all__ = ["Admission", "Slots", "Ticket", "slots_for"]


#: How often a caller that waits looks for slots that died with their loop, in seconds.
_LOOK_AGAIN_S = 1.0


class Ticket:
    """One caller's place: it waits, or it holds a slot.

    Attributes:
        label: what to call it when somebody asks who holds the slots; no content.
        since_ns: when it got its slot.
        grant: called when it is admitted after a wait.
        loop: the event loop it belongs to: a slot must not die with it.
    """

    __slots__ = ("grant", "label", "loop", "since_ns")

    def __init__(
        self,
        label: str = "",
        grant: Callable[[], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.label = label
        self.since_ns = 0
        self.grant = grant
        self.loop = loop


class Admission:
    """PURE. Who may go on, who waits, who is refused.

    Args:
        max_concurrent: tickets that may hold a slot at once.
        max_queue: tickets that may wait; None for any number.
    """

    __slots__ = ("holders", "max_concurrent", "max_queue", "waiters")

    def __init__(self, max_concurrent: int, max_queue: int | None = None) -> None:
        self.max_concurrent = max_concurrent
        self.max_queue = max_queue
        self.holders: set[Ticket] = set()
        self.waiters: deque[Ticket] = deque()

    def ask(self, ticket: Ticket) -> Literal["admit", "wait", "refuse"]:
        """A new ticket. It overtakes nobody: while others wait it waits too."""
        if not self.waiters and len(self.holders) < self.max_concurrent:
            self.holders.add(ticket)
            return "admit"
        if self.max_queue is not None and len(self.waiters) >= self.max_queue:
            return "refuse"
        self.waiters.append(ticket)
        return "wait"

    def leave(self, ticket: Ticket) -> Ticket | None:
        """A ticket gives up, whether it holds a slot or waits for one. Returns the ticket that is admitted for it.

        A ticket that is not here any more is ignored, so that leaving twice gives no second slot away.
        """
        if ticket in self.holders:
            self.holders.remove(ticket)
            if self.waiters and len(self.holders) < self.max_concurrent:
                successor = self.waiters.popleft()
                self.holders.add(successor)
                return successor
        else:
            try:
                self.waiters.remove(ticket)
            except ValueError:
                return None
        return None


class Slots:
    """The shell of :class:`Admission`: safe over loops and threads."""

    __slots__ = ("__weakref__", "_admission", "_lock", "address")

    def __init__(self, address: str, limits: Limits) -> None:
        assert limits.max_concurrent is not None
        self.address = address
        self._admission = Admission(limits.max_concurrent, limits.max_queue)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return (
            f"Slots({self.address}, {len(self._admission.holders)} of {self._admission.max_concurrent} in use, "
            f"{len(self._admission.waiters)} waiting)"
        )

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot now."""
        return len(self._admission.waiters)

    def try_acquire(self, label: str, loop: asyncio.AbstractEventLoop | None = None) -> Ticket | None:
        """A slot at once, or None if the call would have to wait. With a loop it comes back when that is closed."""
        admission = self._admission
        ticket = Ticket(label, None, loop)
        with self._lock:
            if admission.waiters or len(admission.holders) >= admission.max_concurrent:
                return None
            admission.holders.add(ticket)
        ticket.since_ns = time.perf_counter_ns()
        return ticket

    async def acquire(self, label: str, timeout_s: float | None) -> Ticket:
        """Wait for a slot, at most ``timeout_s`` seconds.

        Raises:
            QueueFull: too many wait already.
            QueueTimeout: no slot came in time.
        """
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        ticket = Ticket(label, lambda: _wake(loop, granted), loop)
        self._take_back()
        with self._lock:
            decision = self._admission.ask(ticket)
        if decision == "refuse":
            raise QueueFull(
                f"{self._admission.max_queue} calls wait already (Limits.max_queue); {self._holders()}",
                endpoint=self.address,
            )
        if decision == "wait":
            try:
                async with asyncio.timeout(timeout_s):
                    while not granted.done():
                        await asyncio.wait([granted], timeout=_LOOK_AGAIN_S)
                        self._take_back()
            except BaseException as error:
                self.release(ticket)
                if isinstance(error, TimeoutError):
                    raise QueueTimeout(
                        f"no slot within {timeout_s} s (Limits.queue_timeout_s); {self._holders()}",
                        endpoint=self.address,
                    ) from None
                raise
        ticket.since_ns = time.perf_counter_ns()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Give a slot, or the place in the queue, back. A second call is ignored."""
        while True:
            with self._lock:
                successor = self._admission.leave(ticket)
            if successor is None or successor.grant is None:
                return
            try:
                successor.grant()
                return
            except RuntimeError:  # its loop is closed: nobody is there to take the slot
                ticket = successor

    def _take_back(self) -> None:
        """Slots that are held on a loop that was closed: nobody there will ever give them back."""
        with self._lock:
            dead = [ticket for ticket in self._admission.holders if ticket.loop is not None and ticket.loop.is_closed()]
        for ticket in dead:
            self.release(ticket)

    def _holders(self) -> str:
        now_ns = time.perf_counter_ns()
        with self._lock:
            holders = [(ticket.label, ticket.since_ns) for ticket in self._admission.holders]
        shown = ", ".join(
            f"{label} for {(now_ns - since_ns) / 1e9:.1f} s" if since_ns else label for label, since_ns in holders[:3]
        )
        more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
        return f"all {self._admission.max_concurrent} slots (Limits.max_concurrent) are held: {shown}{more}"


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


_shared: WeakValueDictionary[Hashable, Slots] = WeakValueDictionary()
_shared_lock = threading.Lock()


def slots_for(endpoint: Endpoint) -> Slots | None:
    """The slots that this endpoint shares with its equals in the process; None where it sets no limit."""
    limits = endpoint.limits
    if limits.max_concurrent is None:
        return None
    key = (endpoint.connection_key(), endpoint.path, limits.max_concurrent, limits.max_queue)
    with _shared_lock:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = Slots(endpoint.address, limits)
        return found


def _after_fork() -> None:
    """The child holds none of its parent's slots, and a lock that another thread held would never be freed."""
    global _shared, _shared_lock
    _shared = WeakValueDictionary()
    _shared_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
