"""A voice session: sound up and down at once, an answer that is interrupted, and the waterfall of each turn."""

import asyncio
import math
import struct

from spanwire_websocket import realtime

import spanwire
from spanwire.testing import LoopbackServer, Script

QUESTION = struct.pack("<24000h", *(int(8000 * math.sin(n / 8)) for n in range(24_000)))  # one second of PCM16


async def main(endpoint: spanwire.Endpoint) -> None:
    async with spanwire.ConnectionManager() as manager, manager.session(endpoint, model="gpt-realtime") as session:
        # We say when the user has ended; without this the server listens for that by itself.
        await session.send({"type": "session.update", "session": {"audio": {"input": {"turn_detection": None}}}})
        playback = realtime.Playback()

        async def ask() -> None:
            for frame in realtime.frames(QUESTION, ms=20):
                await session.send(realtime.append_audio(frame))
            await session.send(realtime.commit_audio())
            await session.send(realtime.create_response())

        await ask()
        async for event in session:
            playback.received(event)
            if event.audio:
                playback.played(
                    len(event.audio) // 2
                )  # a speaker says this, as it plays: sound comes faster than it is heard
            if event.type.endswith("transcript.delta"):
                print(event.text, end="", flush=True)
            if playback.played_ms >= 150:
                print(" ... but the user speaks")
                break

        for message in playback.interrupt():
            print(message["type"], message.get("audio_end_ms", ""))
            await session.send(message)

        await ask()
        async for event in session:
            if event.type.endswith("transcript.delta"):
                print(event.text, end="", flush=True)
            if event.type == "response.done" and len(session.turns) == 2:
                break

        for turn in session.turns:
            print(f"\n{turn}")


scripts = [
    Script.say("This is a long answer, word by word by word.", prefill_s=0.05, gap_s=0.02),
    Script.say("A short one.", prefill_s=0.03, gap_s=0.01),
]
with LoopbackServer(scripts, part="websocket") as server:
    asyncio.run(main(server.endpoint()))
