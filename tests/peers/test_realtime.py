"""Realtime sessions with a server that other people wrote."""

from __future__ import annotations

import pytest
from spanwire_websocket import realtime

import spanwire
from tests.peers.conftest import HELLO, SLOW, TOOL, Peer
from tests.support import assert_adds_up, run

pytestmark = [pytest.mark.peers, pytest.mark.timeout(60, func_only=True)]


async def answer(session: spanwire.Session, prompt: str) -> list[spanwire.SessionEvent]:
    """The events of one turn."""
    await session.send(realtime.user_text(prompt))
    await session.send(realtime.create_response())
    events = []
    async for event in session:
        events.append(event)
        if event.type in {"response.done", "error"}:
            break
    return events


def test_turns_on_aimocks_realtime(aimock: Peer) -> None:
    """Two answers and a tool call in one session: as scripted, each a turn of its own, on one connection."""

    async def body() -> None:
        endpoint = spanwire.Endpoint(aimock.url().replace("http", "ws"), proxy=None)
        async with spanwire.ConnectionManager() as manager:
            async with manager.session(endpoint, model=aimock.model) as session:
                assert (await anext(session)).type == "session.created"
                settings = {"type": "realtime", "output_modalities": ["text"]}
                await session.send({"type": "session.update", "session": settings})
                for prompt, text in (("hello", HELLO), ("slow", SLOW), ("weather", TOOL[1])):
                    events = await answer(session, prompt)
                    assert events[-1].type == "response.done"
                    deltas = [event for event in events if event.type.endswith(".delta")]
                    assert "".join(event.text for event in deltas) == text
                turns = session.turns
        assert [turn.outcome for turn in turns] == ["completed"] * 3
        for turn in turns:
            assert_adds_up(turn)
            assert turn.first_content_s is not None
        assert len({turn.connection.id for turn in turns if turn.connection is not None}) == 1

    run(body)
