"""One connection with the whole exchange on it: any bytes, in any split, and then the connection's end.

Input: what the server sends; behind it the cuts (see ``Controls``), and last a byte of settings (``_Settings``). With
``framed`` the length, and maybe a coding, is put around the body here, since mutations seldom leave it right.
"""

from __future__ import annotations

import asyncio
import atexit
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from spanwire_sse.codec import OpenAIChat
from spanwire_sse.exchange import HTTPExchange

from fuzz.common import Controls, Evidence, check_chunks, check_joined, cut, single_bytes
from spanwire.calls import Call, Chunk, Embeddings
from spanwire.endpoint import Endpoint, Limits, Timeouts
from spanwire.errors import ConnectionFailed, ProtocolError, SpanwireError
from spanwire.net.http1 import HTTP1Connection
from spanwire.transport import Attempt, Exchange, Item

_REQUEST = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"
_CHAT = Call.chat("m", [{"role": "user", "content": "hi"}])
_EMBEDDINGS = Call.embeddings("m", "hi")
_CODEC = OpenAIChat()
_LARGE = Endpoint("http://127.0.0.1:1")
_SMALL = Endpoint("http://127.0.0.1:1", limits=Limits(max_event_bytes=300))
#: An answer behind it is the same as without it.
_INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
#: Turns of the loop after which whoever still waits waits for ever.
_TURNS = 20


class _Settings(NamedTuple):
    reset: bool  # the connection ends with a reset instead of an orderly close
    embeddings: bool
    small: bool  # max_event_bytes is 300
    impatient: bool  # two unread items stop the server
    leave: bool  # the caller goes after half of the reads
    again: bool  # calls follow each other on the connection for as long as it may be used
    unary: bool  # no stream was asked for
    framed: bool

    @classmethod
    def of(cls, number: int) -> _Settings:
        return cls(*(bool(number >> bit & 1) for bit in range(8)))


class _Outcome(NamedTuple):
    """What a caller sees."""

    items: list[Any]
    error: type[SpanwireError] | None
    words: str
    status: int | None
    headers: dict[str, str]
    known: tuple[str | None, str | None]


class _Transport:
    """As much of an asyncio transport as a connection uses, with nothing behind it."""

    def __init__(self) -> None:
        self.closing = False
        self.paused = False

    def write(self, data: bytes) -> None:
        assert not self.closing

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class _Exchange(HTTPExchange):
    __slots__ = ("ends",)

    def __init__(self, http: HTTP1Connection, attempt: Attempt, call: Call) -> None:
        super().__init__(http, _CODEC, _CODEC.decoder(call, streamed=attempt.streamed), attempt)
        self.ends = 0

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        early = self._items or self._body or self._parser or self.ends
        assert not early, "a body before its head"
        super().on_head(status, headers)

    def end(self, error: SpanwireError | None = None) -> None:
        self.ends += 1
        super().end(error)


class _Loop:
    """One for all inputs, with what its exception handler was told."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.told: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.told.append(context))
        atexit.register(self.close)

    def close(self) -> None:
        """With all that a failed check has left on it."""
        atexit.unregister(self.close)
        if not self.loop.is_closed():
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()


_loops: list[_Loop] = []


def check(data: bytes) -> None:
    """Raises AssertionError, or whatever a bug raises."""
    controls = Controls(data)
    settings = _Settings.of(controls.byte())
    cuts = controls.cuts()
    answer = _framed(controls.byte(), controls.rest()) if settings.framed else controls.rest()
    if not _loops:
        _loops.append(_Loop())
    loop = _loops[0]
    try:
        whole = loop.loop.run_until_complete(_play([answer] if answer else [], settings))
        for reads in (cut(answer, cuts), single_bytes(answer, 200), [_INTERIM, *cut(answer, cuts)]):
            got = loop.loop.run_until_complete(_play(reads, settings))
            # After a caller has gone, and of what follows on a connection, more or less arrives with another split.
            if not settings.leave:
                assert got[0] == whole[0], f"another split, another outcome: {whole[0]} and {got[0]}"
        assert not loop.told, f"the loop's exception handler was told: {loop.told}"
    except BaseException:
        _loops.pop().close()  # what is left on it is not the next input's
        raise


def _framed(how: int, plain: bytes) -> bytes:
    """The same head, with its body made to fit."""
    head, _, body = plain.partition(b"\r\n\r\n")
    if how & 1:
        packed = zlib.compressobj(1, wbits=31 if how & 2 else 15)
        body = packed.compress(body) + packed.flush()
        head += b"\r\ncontent-encoding: " + (b"gzip" if how & 2 else b"deflate")
    if how & 4:
        return head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    size = 1 + (how >> 3) * 8  # of a chunk
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + b"\r\ntransfer-encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


async def _play(reads: Sequence[bytes], settings: _Settings) -> list[_Outcome]:
    transport = _Transport()
    connection = HTTP1Connection("h:1")
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    left = list(reads)
    outcomes: list[_Outcome] = []
    while True:
        outcomes.append(await _one(connection, transport, left, settings))
        if not (settings.again and left and connection.usable()):
            break
    if not transport.closing:
        connection.connection_lost(None)
        assert not connection.usable()
    return outcomes


async def _one(connection: HTTP1Connection, transport: _Transport, left: list[bytes], settings: _Settings) -> _Outcome:
    """A call from its request to its end; takes what it gets off ``left``."""
    released: list[bool] = []
    attempt = Attempt(
        _SMALL if settings.small else _LARGE,
        timeouts=Timeouts(),
        streamed=not settings.unary,
        on_released=lambda: released.append(connection.usable()),
    )
    exchange = _Exchange(connection, attempt, _EMBEDDINGS if settings.embeddings else _CHAT)
    if settings.impatient:
        exchange._high = 2
    assert connection.send(_REQUEST, exchange)
    exchange.on_sent()
    reading = asyncio.ensure_future(_read(exchange))
    gone = False
    leave_at = len(left) // 2 if settings.leave else -1
    while left and not transport.closing and not released:
        if len(left) == leave_at:
            exchange.abort()
            gone = True
            break
        connection.data_received(left.pop(0))
        if len(left) % 16 > 3 and not transport.paused:
            continue  # several reads before the reader's turn, as on a busy loop; and turns are slow
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            if not transport.paused or transport.closing:
                break
        else:
            raise AssertionError("the connection stays paused although everything was read")
    cut_off = not released  # the message has not ended, or the end of the connection is its end
    if cut_off or transport.closing:
        if cut_off:
            left.clear()  # nothing came after the end of the connection
        connection.connection_lost(ConnectionResetError(104, "reset") if settings.reset else None)
        transport.closing = True
    for _ in range(_TURNS):
        if reading.done():
            break
        await asyncio.sleep(0)
    assert reading.done(), "no end: a caller would wait for ever"
    items, error = reading.result()
    assert await _read(exchange) == ([], None), "something came after the end"
    assert exchange.ends == 1 or (gone and not exchange.ends), f"{exchange.ends} ends"
    assert len(released) == 1, f"released {len(released)} times"
    _check_call(exchange, attempt, items, error, gone=gone)
    if error is None and cut_off and exchange.ends:
        bounded = {"content-length", "transfer-encoding"} & set(exchange.head.headers)
        assert exchange._decoder.done or not (bounded or settings.reset), "a cut taken for an end"
    return _Outcome(
        [_plain(item) for item in items],
        None if error is None else type(error),
        "" if error is None or isinstance(error, ConnectionFailed) else str(error),
        exchange.head.status,
        dict(exchange.head.headers),
        (exchange.head.id, exchange.head.model),
    )


async def _read(exchange: Exchange) -> tuple[list[Item], SpanwireError | None]:
    items: list[Item] = []
    try:
        while batch := await exchange.read():
            items.extend(batch)
    except SpanwireError as error:
        return items, error
    return items, None


def _plain(item: Item) -> Any:
    if isinstance(item, Embeddings):  # compared by identity
        return repr((item.vectors, item.model, item.usage))
    return item


def _check_call(
    exchange: _Exchange, attempt: Attempt, items: list[Item], error: SpanwireError | None, *, gone: bool
) -> None:
    if error is not None:
        assert str(error), "an error without words"
        # A bug in our own code becomes the call's error, and would hide there.
        cause = error.__cause__
        hidden = isinstance(error, ProtocolError) and (
            "could not be handled" in error.message or "the dialect failed" in error.message
        )
        if hidden:
            raise AssertionError(f"a bug became an error: {error!r}") from cause
    elif not gone:  # or what had arrived was dropped
        assert items, "an invented success"
        assert 200 <= (exchange.head.status or 0) < 300, "a success of an error status"
        assert exchange.complete
        assert attempt.marks.ended_ns, "an end without its time"
    chunks = [item for item in items if isinstance(item, Chunk)]
    evidence = Evidence()
    for chunk in chunks:
        if chunk.raw:
            evidence.add(chunk.raw)
    check_chunks(chunks, evidence)
    check_joined(chunks)
    marks = attempt.marks
    last_byte_ns = marks.last_byte_ns if marks.ended_ns else 0  # of a call that failed, it may be of the read before
    for earlier, later in (
        (marks.sent_ns, marks.first_chunk_ns),
        (marks.first_byte_ns, marks.first_chunk_ns),
        (marks.first_byte_ns, last_byte_ns),
        (marks.first_chunk_ns, marks.first_content_ns),
        (marks.first_chunk_ns, marks.last_chunk_ns),
        (marks.last_chunk_ns, last_byte_ns),
        (last_byte_ns, marks.ended_ns),
    ):
        assert not (earlier and later) or earlier <= later, f"marks out of order: {dict(_marks(attempt))}"


def _marks(attempt: Attempt) -> list[tuple[str, Any]]:
    return [(name, getattr(attempt.marks, name)) for name in attempt.marks.__slots__]
