"""`spanwire probe` on real servers: do its numbers make sense? Waits of a server are lower bounds, nothing more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.peers.conftest import KATAN_FIRST_TOKEN_S, SLOW_FIRST_TOKEN_S, Peer

# Not the fixtures' time: the first test that uses a peer may have to install it, and that has a limit of its own.
pytestmark = [pytest.mark.peers, pytest.mark.timeout(120, func_only=True)]

CALLS = 20
#: A server's timer may fire a little early by our clock; Node's by up to a millisecond.
TIMER_SLACK_S = 0.002


class Told(NamedTuple):
    """What the peer was told to do."""

    prompt: str
    first_token_s: float
    handshake: set[str]


TOLD = {
    "aimock": Told("slow", SLOW_FIRST_TOKEN_S, {"tcp"}),
    "litellm": Told("slow", SLOW_FIRST_TOKEN_S, {"tcp"}),
    "katan": Told("hello", KATAN_FIRST_TOKEN_S, {"tcp", "tls"}),
}


def probe(peer: Peer, *more: str) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("spanwire")), "probe", peer.url(), "--model", peer.model, "--json"]
    command += ["--prompt", TOLD[peer.name].prompt, "-n", str(CALLS), *more]
    if peer.ca is not None:
        command += ["--ca", str(peer.ca)]
    env = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    if peer.api_key is not None:
        env["SPANWIRE_API_KEY"] = peer.api_key
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def duration(parts: dict[str, Any]) -> float:
    return float(sum(part["duration_s"] for part in parts.values()))


def assert_makes_sense(timeline: dict[str, Any], told: Told) -> None:
    assert timeline["outcome"] == "completed"
    assert [attempt["outcome"] for attempt in timeline["attempts"]] == ["completed"]
    segments = timeline["segments"]
    assert duration(segments) == pytest.approx(timeline["total_s"], abs=1e-6)
    for segment in segments.values():
        assert segment["duration_s"] > 0
        if "parts" in segment:
            assert duration(segment["parts"]) == pytest.approx(segment["duration_s"], abs=1e-6)
    assert 0 < timeline["first_byte_s"] <= timeline["first_chunk_s"]
    assert timeline["first_chunk_s"] <= timeline["first_content_s"] <= timeline["total_s"]
    assert segments["model"]["parts"]["prefill"]["duration_s"] >= told.first_token_s - TIMER_SLACK_S
    # The servers wait, we don't: what is ours and the network's is the smaller part of the call.
    assert segments["model"]["duration_s"] > timeline["total_s"] / 2


def assert_same_as_timelines(group: dict[str, Any], timelines: list[dict[str, Any]]) -> None:
    """The table of a group says what its calls say."""
    assert group["calls"] == group["total"]["n"] == len(timelines)
    totals = sorted(timeline["total_s"] for timeline in timelines)
    assert (group["total"]["min_s"], group["total"]["max_s"]) == (totals[0], totals[-1])
    assert totals[0] <= group["total"]["p50_s"] <= totals[-1]
    for name, segment in group["segments"].items():
        assert segment["n"] == sum(name in timeline["segments"] for timeline in timelines)


def test_cold_calls(peer: Peer) -> None:
    told = TOLD[peer.name]
    found = probe(peer, "--cold")
    assert found["calls"] == {"planned": CALLS, "ok": CALLS, "failed": 0, "errors": {}}
    assert found["connections_opened"] == CALLS
    assert len({timeline["connection"]["id"] for timeline in found["timelines"]}) == CALLS
    for timeline in found["timelines"]:
        assert_makes_sense(timeline, told)
        assert not timeline["connection"]["reused"]
        assert set(timeline["segments"]["handshake"]["parts"]) >= told.handshake
    assert "warm" not in found
    assert_same_as_timelines(found["cold"], found["timelines"])
    assert found["cold"]["segments"]["handshake"]["n"] == CALLS


def test_warm_calls(peer: Peer) -> None:
    told = TOLD[peer.name]
    found = probe(peer)
    assert found["calls"] == {"planned": CALLS, "ok": CALLS, "failed": 0, "errors": {}}
    assert found["connections_opened"] == 1
    assert len({timeline["connection"]["id"] for timeline in found["timelines"]}) == 1
    first, *others = found["timelines"]
    assert not first["connection"]["reused"]
    assert set(first["segments"]["handshake"]["parts"]) >= told.handshake
    for timeline in found["timelines"]:
        assert_makes_sense(timeline, told)
    for timeline in others:
        assert timeline["connection"]["reused"]
        assert "handshake" not in timeline["segments"]
    assert_same_as_timelines(found["cold"], [first])
    assert_same_as_timelines(found["warm"], others)


def test_whole_answers(peer: Peer) -> None:
    found = probe(peer, "--unary")
    assert (found["streamed"], found["calls"]["ok"], found["connections_opened"]) == (False, CALLS, 1)
    for timeline in found["timelines"]:
        assert duration(timeline["segments"]) == pytest.approx(timeline["total_s"], abs=1e-6)
        assert timeline["segments"]["model"]["duration_s"] > 0
        assert "parts" not in timeline["segments"]["model"]


def test_several_at_once(scripted: Peer) -> None:
    at_once = 4
    found = probe(scripted, "--concurrency", str(at_once))
    assert found["calls"]["ok"] == CALLS
    assert found["connections_opened"] == at_once
    # 20 calls of at least 0.2 s each, 4 at once.
    assert found["elapsed_s"] >= CALLS / at_once * SLOW_FIRST_TOKEN_S - TIMER_SLACK_S
    assert found["elapsed_s"] < sum(timeline["total_s"] for timeline in found["timelines"]) / 2
