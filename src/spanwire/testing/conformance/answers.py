"""What comes back: every piece, unchanged, in order, when it comes, and once."""

# A manager and a stream in it are two steps; an error may come anywhere while a stream is entered and read.
# ruff: noqa: SIM117

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ...calls import Call, Chunk, Usage
from ..script import Script, ScriptedTool
from .abilities import needs
from .harness import PATIENCE_S, Kit, attempt_of, read, slowly
from .relay import Relay

WORDS = ("Hello", " from", " the", " scripted", " server", ".")
#: Two to four bytes each in UTF-8, combining marks, both directions, a line separator, quotes and line ends.
UNICODE = (
    "é",
    "\u4f60\u597d",
    " 👩‍👩‍👧‍👦",
    "\u05e9\u05dc\u05d5\u05dd",
    "e\u0301",
    "\u2028",
    '"\\',
    "\r\n\n",
    "\t\U0001d518",
)
MANY = 10_000


def hello(**more: Any) -> Script:
    """A short answer."""
    return Script(tokens=WORDS, **more)


def everything(kit: Kit) -> Script:
    """All kinds of content that the wire has."""
    tools = (
        ScriptedTool("search", ['{"q', '": "a', ' b"}'], id="call_a"),
        ScriptedTool("noop", ["{}"], id="call_b"),
    )
    return Script(
        reasoning=("First,", " think", ".") if kit.can("reasoning") else (),
        tokens=(*WORDS, *UNICODE),
        tool_calls=tools if kit.can("tools") else (),
        usage=Usage(7, 11, 18) if kit.can("usage") else None,
    )


class Answers(Kit):
    """What comes back."""

    def test_chunks_come_in_order_and_unchanged(self) -> None:
        """Proves: text, reasoning and tool calls arrive whole and in the order in which they were sent.

        If it fails: items must be put into the inbox in the order of the wire. Text that differs in a few characters was
        decoded with another encoding than UTF-8, or piece by piece (decode only whole messages).
        """
        script = everything(self)
        with self.scene(script) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        chunks = [chunk async for chunk in stream]
                assert all(isinstance(chunk, Chunk) for chunk in chunks)
                assert "".join(chunk.reasoning for chunk in chunks) == "".join(script.reasoning)
                assert "".join(chunk.text for chunk in chunks) == "".join(script.tokens)
                kinds = [
                    kind
                    for chunk in chunks
                    for kind, there in enumerate((chunk.reasoning, chunk.text, chunk.tool_calls, chunk.finish_reason))
                    if there
                ]
                assert kinds == sorted(kinds), "reasoning, text, tool calls and finish reason are not in the order sent"
                self._assert_tools(script, chunks)
                assert stream.timeline.outcome == "completed"
                assert stream.reply.finish_reason == script.finish

            scene.run(body)

    @staticmethod
    def _assert_tools(script: Script, chunks: list[Chunk]) -> None:
        pieces: dict[int, str] = {}
        names: dict[int, str | None] = {}
        for chunk in chunks:
            for delta in chunk.tool_calls:
                pieces[delta.index] = pieces.get(delta.index, "") + delta.arguments
                names[delta.index] = names.get(delta.index) or delta.name
        assert [*names.values()] == [tool.name for tool in script.tool_calls]
        assert [*pieces.values()] == ["".join(tool.arguments) for tool in script.tool_calls]

    @needs("relay")
    @pytest.mark.parametrize("piece_bytes", [1, 13])
    def test_bytes_may_be_split_anywhere(self, piece_bytes: int) -> None:
        """Proves: an answer that comes in pieces of a few bytes, cut inside characters and frames, is the same answer.

        If it fails: keep what is incomplete until the rest has come; decode text only when it is whole.
        """
        script = everything(self)
        # Long words of several bytes for each character, so that nearly every cut is inside one, wherever it falls.
        tokens = ["".join(UNICODE[:6]) * 12, *UNICODE, "\U0001d518" * 100]
        short = Script(tokens=tokens, usage=script.usage)
        with self.scene(short) as scene:

            async def body() -> None:
                # Byte by byte without a pause: a slow reader may find two at once, and the test takes no seconds.
                with Relay(scene.endpoint(), piece_bytes=piece_bytes, pause_s=0.0001 * (piece_bytes > 1)) as relay:
                    async with scene.manager() as manager:
                        async with manager.stream(relay.endpoint, self.call()) as stream:
                            assert await read(stream) == "".join(tokens)

            scene.run(body)

    def test_a_piece_is_there_when_it_has_come(self) -> None:
        """Proves: what has arrived is delivered while the server is still at work, not with the end of the answer.

        If it fails: something buffers. Call ``Inbox.wake()`` after each batch; look for compression, and for readers that
        wait until a buffer is full.
        """
        self.must("hang")
        with self.scene(hello(role_chunk=False, hang_after=3)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        text = ""
                        try:
                            async with asyncio.timeout(PATIENCE_S / 4):
                                while text != "".join(WORDS[:3]):
                                    text += (await anext(stream)).text
                        except TimeoutError:
                            pytest.fail(f"the server has sent {WORDS[:3]}, and only {text!r} was delivered")

            scene.run(body)

    def test_reading_ends_at_the_terminal_event_and_not_before(self) -> None:
        """Proves: a read that finds nothing waits; an empty batch means the end, and the end comes once.

        If it fails: ``read()`` may return an empty batch only at the terminal event; after it, it does so again.
        """
        with self.scene(slowly(WORDS), slowly(WORDS)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        assert await read(stream) == "".join(WORDS)
                        assert await read(stream) == ""
                async with scene.connection() as direct:
                    exchange, _ = await direct.start(self.call())
                    text = ""
                    while items := await exchange.read():
                        text += "".join(item.text for item in items if isinstance(item, Chunk))
                    assert text == "".join(WORDS)
                    assert exchange.complete
                    assert not await exchange.read()

            scene.run(body)

    def test_an_empty_answer_is_an_answer(self) -> None:
        """Proves: an answer without a single token ends well, with its finish reason and no text.

        If it fails: an empty text is no missing text. Only an answer without its end is ``Truncated``.
        """
        with self.scene(Script()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        assert await read(stream) == ""
                    assert stream.reply.finish_reason == "stop"
                    if self.can("unary"):
                        reply = await manager.complete(scene.endpoint(), self.call())
                        assert (reply.text, reply.finish_reason) == ("", "stop")

            scene.run(body)

    @pytest.mark.parametrize("consumer", ["at once", "late"])
    def test_ten_thousand_chunks(self, consumer: str) -> None:
        """Proves: none is lost when there are many, also where the consumer is slower than the server.

        If it fails: with a late consumer, ``Inbox.on_high`` and ``on_low`` stop the peer and let it go on; nothing that
        had come may be dropped, and a stream that was stopped has to go on by itself.
        """
        tokens = [f" {number}" for number in range(MANY)]
        with self.scene(Script(tokens=tokens)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        if consumer == "late":
                            await scene.wait_for(lambda s: s.requests)
                            await asyncio.sleep(0.1)
                        assert await read(stream) == "".join(tokens)
                    assert stream.timeline.outcome == "completed"

            scene.run(body)

    @needs("unary")
    def test_a_whole_answer_is_the_joined_stream(self) -> None:
        """Proves: the same answer, asked for as a whole and as a stream, gives the same Reply.

        If it fails: both decoders have to say the same of text, reasoning, tool calls (ids too), finish reason and usage.
        """
        with self.scene(everything(self)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    async with manager.stream(scene.endpoint(), self.call()) as stream:
                        await read(stream)
                    whole = await manager.complete(scene.endpoint(), self.call())
                for name in ("text", "reasoning", "tool_calls", "finish_reason", "usage"):
                    assert getattr(whole, name) == getattr(stream.reply, name), name
                assert attempt_of(stream.timeline).streamed
                assert whole.timeline is not None
                if self.can("whole"):
                    assert not attempt_of(whole.timeline).streamed

            scene.run(body)

    @needs("usage")
    def test_usage_comes_once_and_is_not_made_up(self) -> None:
        """Proves: the server's count of tokens is on exactly one chunk, and None where it said nothing.

        If it fails: put ``usage`` on the chunk that brought it, and nowhere else. Never count by yourself.
        """
        counted = Usage(7, 6, 13)
        with self.scene(hello(usage=counted), hello(usage=None)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    for expected in ([counted], []):
                        async with manager.stream(scene.endpoint(), self.call()) as stream:
                            found = [chunk.usage async for chunk in stream if chunk.usage is not None]
                        assert found == expected
                        assert stream.reply.usage == (expected[0] if expected else None)
                        assert stream.timeline.usage == stream.reply.usage

            scene.run(body)

    @needs("embeddings")
    def test_embeddings_are_lists_of_numbers(self) -> None:
        """Proves: one vector for each input, in the inputs' order.

        If it fails: ``read()`` of an embeddings call gives one ``Embeddings``, its vectors sorted as the inputs were.
        """
        with self.scene(Script(dimensions=8)) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    texts = ["one", "two", "one"]
                    found = await manager.embed(scene.endpoint(), Call.embeddings("m", texts))
                    assert [len(vector) for vector in found.vectors] == [8, 8, 8]
                    assert found.vectors[0] == found.vectors[2]
                    assert found.vectors[0] != found.vectors[1]

            scene.run(body)

    def test_a_large_request_arrives_whole(self) -> None:
        """Proves: two megabytes of prompt reach the server, and the answer comes back.

        If it fails: look for a limit on messages in the library, and for a write whose rest is never written.
        """
        big = "x" * 2_000_000
        with self.scene(hello()) as scene:

            async def body() -> None:
                async with scene.manager() as manager:
                    call = Call.chat("m", [{"role": "user", "content": big}])
                    async with manager.stream(scene.endpoint(), call) as stream:
                        assert await read(stream) == "".join(WORDS)

            scene.run(body)
            assert len(scene.server.requests[-1].raw) >= len(big)
