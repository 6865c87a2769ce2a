"""PURE: PCM for the scripted realtime server: where speech begins and ends in it, and a tone to say something with."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator

__all__ = ["BYTES_PER_MS", "SpeechDetector", "tone"]

#: PCM16, mono, 24 kHz: OpenAI Realtime's only linear format. G.711 (``audio/pcmu``, ``audio/pcma``) has 8 kHz, one byte.
BYTES_PER_MS = {"audio/pcm": 48, "audio/pcmu": 8, "audio/pcma": 8}
_WINDOW_MS = 10
_WINDOW = _WINDOW_MS * BYTES_PER_MS["audio/pcm"]
#: About -30 dB of full scale: louder is speech. Tests speak in tones and are silent in zeros.
_LOUD = 1000
_TONE_HZ = 480


def tone(milliseconds: int) -> bytes:
    """PCM16 at 24 kHz, little-endian: a quiet 480 Hz, which repeats every 50 samples, so that pieces join."""
    period = array("h", (int(8000 * math.sin(2 * math.pi * n * _TONE_HZ / 24_000)) for n in range(50)))
    if sys.byteorder == "big":
        period.byteswap()
    return (period.tobytes() * (milliseconds * 24 // 50 + 1))[: milliseconds * BYTES_PER_MS["audio/pcm"]]


class SpeechDetector:
    """Says where speech begins and ends, by loudness alone, in the time of the audio: no clock is looked at.

    Args:
        silence_ms: so much silence ends it.
    """

    def __init__(self, silence_ms: int) -> None:
        self._silence_ms = silence_ms
        self._rest = b""
        self._quiet_ms = 0
        self._at_ms = 0
        self.speaking = False

    def feed(self, audio: bytes) -> Iterator[tuple[bool, int]]:
        """Take PCM16 of any length. Yields (speech begins, or ends, and at which millisecond of all audio so far)."""
        data = self._rest + audio
        whole = len(data) - len(data) % _WINDOW
        self._rest = data[whole:]
        for start in range(0, whole, _WINDOW):
            samples = array("h", data[start : start + _WINDOW])
            if sys.byteorder == "big":
                samples.byteswap()
            begin_ms, self._at_ms = self._at_ms, self._at_ms + _WINDOW_MS
            if max(samples) > _LOUD or min(samples) < -_LOUD:
                self._quiet_ms = 0
                if not self.speaking:
                    self.speaking = True
                    yield True, begin_ms
            elif self.speaking:
                self._quiet_ms += _WINDOW_MS
                if self._quiet_ms >= self._silence_ms:
                    self.speaking = False
                    self._quiet_ms = 0
                    yield False, self._at_ms
