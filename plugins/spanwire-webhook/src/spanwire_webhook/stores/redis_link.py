"""Commands to one server over pooled connections: sent again where that is safe, followed where the server moves, and durable
when they return, as far as the server can say so.

Whatever is sent here may be sent again: scripts find by their token that they were done. So redis-py's own retries are off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from spanwire.errors import ConfigurationError, JobError

from .redis import RedisAddress
from .redis_lua import SCRIPTS

__all__ = ["Command", "Emptied", "Link"]

_log = logging.getLogger("spanwire.jobs")

Command: TypeAlias = tuple[Any, ...]

#: How long something is tried again before its caller is told, in seconds. Source: senders of webhooks wait 10 s or more (Baseten),
#: and a server that is restarted is back in less.
_TRY_S = 5.0
#: Waits between tries, in seconds.
_FIRST_S, _LONGEST_S = 0.02, 0.5
_CONNECT_S = 3.0
#: How long the server may take to answer, in seconds. Longer than it waits for its disk.
_ANSWER_S = 10.0
_DISK_MS = 8000
#: How long close() waits for what was begun, in seconds.
_LEAVE_S = _TRY_S + _ANSWER_S
#: What passes by itself. Refused credentials are a ConnectionError too.
_PASSES = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,  # a replica, which was the primary a moment ago
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.AskError,  # also "moved"; a slot that is on its way is soon there
)
_REFUSED = (
    redis.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.AuthenticationWrongNumberOfArgsError,
)


class Emptied(Exception):
    """The server has nothing of ours any more."""


class Link:
    """Any thread; also in a forked child, which uses no connection of its parent.

    Args:
        emptied: called when the server has lost the store, which is then asked once more.
    """

    _pool: redis.ConnectionPool
    _client: redis.Redis

    def __init__(self, address: RedisAddress, version: int, emptied: Callable[[], None]) -> None:
        self.address = address
        self.prefix = "{" + address.prefix + "}:"
        self.waits = False  # for the disk: see durability()
        self._version = version
        self._emptied = emptied
        self._parked: list[object] = []
        self._shas: dict[str, str] = {}
        self._moved: tuple[str, int] | None = None
        self._closed = False
        self._start()

    def key(self, name: str) -> str:
        """A key's whole name."""
        return self.prefix + name

    def script(self, name: str, *arguments: object, before: Sequence[Command] = (), durable: bool = False) -> Any:
        """What a script answers. ``before``: commands just before it, on the same connection. ``durable``: it is on the disk."""
        for _ in range(3):
            script: Command = ("EVALSHA", self._sha(name), 1, self.prefix, self._version, *arguments)
            try:
                return self.run([*before, script], durable=durable)[-1]
            except redis.exceptions.NoScriptError:  # the server was restarted, or is new
                self._shas.pop(name, None)
            except Emptied:
                self._emptied()
        raise JobError(f"the store of jobs at {self.address.place} loses what is written", retryable=True)

    def bare(self, name: str, *arguments: object, durable: bool = False) -> Any:
        """A script that is not told our version."""
        return self.run([("EVAL", SCRIPTS[name], 1, self.prefix, *arguments)], durable=durable)[-1]

    def run(self, commands: Sequence[Command], *, durable: bool = False, try_s: float | None = None) -> list[Any]:
        """What each of these commands answers, in one round trip."""
        waits = durable and self.waits
        sent = [*commands, ("WAITAOF", 1, 0, _DISK_MS)] if waits else commands
        give_up_s = time.monotonic() + (_TRY_S if try_s is None else try_s)
        pause_s = _FIRST_S
        with self._begun():
            while True:
                try:
                    answers = self._once(sent)
                    break
                except _REFUSED as error:
                    raise JobError(f"the store of jobs at {self.address.place} refuses us: {error}") from error
                except _PASSES as error:
                    cause = error
                    self.follow(error)
                except redis.exceptions.NoScriptError:
                    raise
                except redis.RedisError as error:
                    raise JobError(f"the store of jobs at {self.address.place} cannot be used: {error}") from error
                if self._closed or time.monotonic() >= give_up_s:
                    raise self._down(cause) from cause
                _log.debug("the store of jobs is asked again: %s", cause)
                time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
                pause_s = min(pause_s * 2, _LONGEST_S)
        if waits:
            on_disk = answers.pop()
            if int(on_disk[0]) < 1:
                raise JobError(
                    f"the store of jobs at {self.address.place} did not say within {_DISK_MS / 1000:g} s that it is on the disk",
                    retryable=True,
                )
        return answers

    def load(self) -> None:
        """Have the scripts on the server."""
        for name in SCRIPTS:
            self._sha(name)

    def connection(self) -> redis.Connection:
        """A connection that is not of the pool; its caller closes it."""
        self._alive()
        made: redis.Connection = self._pool.make_connection()  # type: ignore[assignment] # it cannot say of which class
        return made

    def follow(self, error: Exception) -> None:
        """Go to where a cluster says that our one slot is; back to where the URL says, if that one has gone, or is a replica now:
        the host's name may lead to the new primary, and our connections to the old one do not break."""
        error = _known(error)
        to = (str(error.host), int(error.port)) if isinstance(error, redis.exceptions.MovedError) else None
        with self._changed:
            if to == self._moved and not isinstance(error, redis.ReadOnlyError):
                return
            self._moved = to
            before = self._pool
            self._connect()
        before.disconnect(inuse_connections=False)

    def close(self) -> None:
        """What was begun is finished; then no connection is left."""
        if self._pid != os.getpid():
            self._closed = True
            return
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running, _LEAVE_S)
        self._pool.disconnect()

    def durability(self) -> None:
        """Find out what a write is worth here, and say so where it is not safe. Raises ConfigurationError."""
        self._ask("PING")  # not before it has read its file: until then it says that it has none
        memory, persistence = self._ask("INFO", "memory"), self._ask("INFO", "persistence")
        on = _field(persistence, "aof_enabled")
        fsync = _field(self._ask("CONFIG GET", "appendfsync"), "appendfsync")
        evicts = _field(memory, "maxmemory_policy")
        can_wait = False
        if on != "0" and fsync not in ("always", "no"):
            can_wait = (
                self._ask("WAITAOF", 1, 0, 1) is not None
            )  # not before Redis 7.2, and not where nothing is appended
        self.waits = can_wait and self.address.wait
        said: list[str] = []
        if on == "0":
            said.append(
                "append-only is off: when the server stops, all jobs since its last snapshot are lost, and webhooks "
                "that were answered 2xx (set appendonly yes and appendfsync always)"
            )
        elif fsync == "no":
            said.append(
                "appendfsync is no: when its machine fails, what was written in the last half minute or so is lost, "
                "also webhooks that were answered 2xx (set appendfsync always)"
            )
        elif fsync == "everysec" and self.waits:
            said.append(
                "appendfsync is everysec: nothing is lost, since each write waits for the disk, up to a second "
                "(appendfsync always is faster here)"
            )
        elif fsync == "everysec":
            said.append(
                "appendfsync is everysec: when its machine fails, up to a second of jobs and of webhooks that were "
                "answered 2xx is lost (set appendfsync always)"
            )
        elif fsync is None and not self.waits:
            said.append(
                "it does not say whether it appends to a file, and how often that goes to the disk (CONFIG GET is refused): "
                "what may be lost when it fails is for its operator to say"
            )
        if evicts is not None and evicts != "noeviction":
            said.append(f"its eviction policy is {evicts}: when memory is short, it deletes jobs (set noeviction)")
        if said:
            _log.warning("the store of jobs at %s: %s", self.address.place, "; ".join(said))

    # --- inner ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._running = 0
        self._connect()

    def _connect(self) -> None:
        address = self.address
        arguments: dict[str, Any] = {
            "db": address.db,
            "username": address.username,
            "password": address.password,
            "socket_timeout": _ANSWER_S,
            "socket_connect_timeout": _CONNECT_S,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # every server has it, and the answers are the same everywhere
        }
        if address.path:
            arguments |= {"path": address.path, "connection_class": redis.UnixDomainSocketConnection}
            del arguments["socket_connect_timeout"]
        else:
            host, port = self._moved or (address.host, address.port)
            arguments |= {"host": host, "port": port, "socket_keepalive": True}
        if address.tls:
            arguments |= {
                "connection_class": redis.SSLConnection,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_ca_certs": address.cacert,
                "ssl_certfile": address.cert,
                "ssl_keyfile": address.key,
            }
        self._pool = redis.ConnectionPool(**arguments)
        self._client = redis.Redis(connection_pool=self._pool)

    def _alive(self) -> None:
        if self._pid != os.getpid():
            self._parked.append((self._pool, self._changed))  # not to be touched here, not even to close it
            self._start()
        if self._closed:
            raise JobError("the store of jobs is closed")

    @contextlib.contextmanager
    def _begun(self) -> Iterator[None]:
        self._alive()
        with self._changed:
            if self._closed:
                raise JobError("the store of jobs is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _once(self, commands: Sequence[Command]) -> list[Any]:
        """The first error that is one is raised."""
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            answers = pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, redis.ResponseError) and str(answer).startswith("WAITAOF") and len(answers) > 1:
                self._stop_waiting()
                answers[-1] = (1, 0)
            elif isinstance(answer, Exception):
                raise self._read(answer)
        return answers

    def _read(self, error: Exception) -> Exception:
        text, error = str(error), _known(error)
        if "SPANWIREEMPTY" in text:
            return Emptied()
        if "SPANWIREVERSION" in text:
            return newer(self.address.place, text.rpartition(" ")[2], self._version)
        if "SPANWIREBODY" in text:
            return JobError(f"the store of jobs at {self.address.place} has not kept a body", retryable=True)
        if isinstance(error, redis.exceptions.OutOfMemoryError):
            return JobError(f"the store of jobs at {self.address.place} is full: {error}", retryable=True)
        if isinstance(error, redis.ResponseError) and text.startswith(("MISCONF", "NOREPLICAS")):
            return JobError(f"the store of jobs at {self.address.place} cannot write: {error}", retryable=True)
        if isinstance(error, redis.ResponseError) and not isinstance(
            error, (redis.exceptions.NoScriptError, *_PASSES, *_REFUSED)
        ):
            return JobError(f"the store of jobs at {self.address.place} has answered: {text}")
        return error

    def _sha(self, name: str) -> str:
        sha = self._shas.get(name)
        if sha is None:
            loaded = self.run([("SCRIPT", "LOAD", SCRIPTS[name])])[0]
            sha = self._shas[name] = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        return sha

    def _ask(self, *command: object) -> Any:
        """None where it is refused."""
        try:
            return self.run([command])[0]
        except JobError as error:
            if error.retryable:
                raise
            return None

    def _stop_waiting(self) -> None:
        self.waits = False
        _log.warning(
            "the store of jobs at %s: append-only was switched off: what is written from now on is lost when it stops",
            self.address.place,
        )

    def _down(self, error: Exception) -> JobError:
        return JobError(f"the store of jobs at {self.address.place} cannot be used: {error}", retryable=True)


def _known(error: Exception) -> Exception:
    """What a cluster says: redis-py before 6 has classes for that, and does not use them."""
    kind, _, rest = str(error).partition(" ")
    if type(error) is redis.ResponseError:
        if kind == "MOVED":
            return redis.exceptions.MovedError(rest)
        if kind in ("ASK", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"):
            return redis.exceptions.TryAgainError(str(error))
    return error


def newer(place: str, theirs: str, ours: int) -> Exception:
    """The store is of another version than ours."""
    return ConfigurationError(
        f"the store {place} was made by a newer spanwire (its version {theirs}, ours is {ours}): pip install -U spanwire-webhook"
        if theirs.isdigit() and int(theirs) > ours
        else f"the store {place} is of version {theirs[:20]!r}, ours is {ours}: open it again"
    )


def _field(answer: object, name: str) -> str | None:
    value = answer.get(name) if isinstance(answer, dict) else None
    return value.decode() if isinstance(value, bytes) else None if value is None else str(value)
