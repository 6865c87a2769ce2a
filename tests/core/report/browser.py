"""Chromium without a window, spoken to over its debugging pipe (Chrome DevTools Protocol): nothing but the browser needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

#: The browser reads at 3 and writes at 4.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def _high(fd: int) -> int:
    """The same file at a number that is not 3 or 4."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return high


class Browser:
    """One page. ``complaints`` are errors and warnings of its console; ``requests`` the URLs that it asked for."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        assert BROWSER is not None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        down_read, down_write = map(_high, os.pipe())
        up_read, up_write = map(_high, os.pipe())
        command = [
            *(sys.executable, "-c", _LAUNCH, str(down_read), str(up_write), BROWSER),
            *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars", "about:blank"),
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(down_read, up_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(down_read)
        os.close(up_write)
        self._down, self._up = down_write, up_read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self.size(width, height)
        self.dark(dark)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._down)
        os.close(self._up)

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._down, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._up, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def _hear(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            if not params["entry"]["text"].startswith("Canvas2D: Multiple readback"):  # that is these tests' looking
                self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error", "assert"):
            self.complaints.append(json.dumps(params["args"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def size(self, width: int, height: int) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, on: bool) -> None:
        self(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}],
        )

    def open(self, path: Path) -> None:
        """Load a file; returns when the page's script has run."""
        self("Page.navigate", url=path.as_uri())
        while True:
            event = self._next()
            self._hear(event)
            if event.get("method") == "Page.loadEventFired":
                break
        self.wait_for_frame()

    def wait_for_frame(self) -> None:
        """Charts are drawn in the frame after the one that asked for it."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path, height: int | None = None) -> None:
        """A PNG of the window, or of the page from its top to ``height``."""
        more: dict[str, Any] = {}
        if height is not None:
            width = self.run("innerWidth")
            more = {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1},
            }
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png", **more)["data"]))
