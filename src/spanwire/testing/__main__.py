"""``python -m spanwire.testing``: the scripted loopback server as a command."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ..errors import ConfigurationError
from .loopback import LoopbackServer, Request, echo
from .reports import DIALECTS
from .script import Script

#: Enough to look at in a debugger; a server that runs for days must not fill the memory.
_KEEP = 1000


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spanwire.testing",
        description="A model server on this machine that answers every chat call with a short sentence.",
        epilog="Prints one line, `URL [ca=FILE] [uds=PATH]`, and serves until Ctrl-C.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port (default: any free one)")
    parser.add_argument("--uds", metavar="PATH", help="listen on this unix socket instead")
    parser.add_argument("--tls", action="store_true", help="serve https with a throw-away CA")
    parser.add_argument("--part", default="sse", metavar="NAME", help="which wire (default: %(default)s)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        dest="options",
        metavar="NAME=VALUE",
        help="an option of the wire's part; the value is JSON, or else text (can be repeated)",
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="answer with N tokens instead of the sentence")
    for name, what in (
        ("queue", "from the request to the headers"),
        ("headers", "from the headers to the first event"),
        ("prefill", "from the first event to the first token"),
        ("token-gap", "between two tokens"),
        ("end", "from the terminal event to the end of the message"),
    ):
        parser.add_argument(f"--{name}-ms", type=float, default=0.0, metavar="MS", help=f"milliseconds {what}")
    parser.add_argument("--server-timing", choices=DIALECTS, help="report these times as such a server does")
    return parser


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit code: 0, or 1 if the address cannot be used."""
    parser = _arguments()
    options = parser.parse_args(arguments)
    try:
        delays = Script(
            tokens=[f" t{number}" for number in range(options.tokens or 0)],
            queue_s=options.queue_ms / 1000,
            headers_s=options.headers_ms / 1000,
            prefill_s=options.prefill_ms / 1000,
            gap_s=options.token_gap_ms / 1000,
            end_s=options.end_ms / 1000,
            server_timing=options.server_timing,
        )

        def answer(request: Request) -> Script:
            return delays if options.tokens is not None else replace(delays, tokens=echo(request).tokens)

        server = LoopbackServer(
            default=answer,
            tls=options.tls,
            host=options.host,
            port=options.port,
            uds=options.uds,
            part=options.part,
            options=dict(options.options),
            keep=_KEEP,
        )
    except ConfigurationError as error:
        parser.error(str(error))
    # Both set here: a shell starts a background job with SIGINT ignored, and SIGTERM would skip the clean end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            server.start()
        except (OSError, OverflowError) as error:  # OverflowError: a port over 65535
            print(f"cannot listen: {error}", file=sys.stderr)
            return 1
        with contextlib.closing(server):
            words = [server.url]
            if server.ca is not None:
                words.append(f"ca={server.ca}")
            if server.uds is not None:
                words.append(f"uds={server.uds}")
            print(*words, flush=True)
            while True:
                time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
