import json
import os
import pty
import socket
from typing import Any

import pytest

from spanwire.testing import LoopbackServer, Script

from .conftest import Spanwire


def lines(text: str) -> dict[str, str]:
    """The report's head: first word of each line to the rest of it."""
    return {line.split()[0]: line.partition(" ")[2].strip() for line in text.splitlines() if line.strip()}


def columns(text: str) -> list[str]:
    """The table's, without those that are there only if some calls lack some part."""
    return [name for name in lines(text)["milliseconds"].split() if name != "calls"]


def refused() -> str:
    """The URL of a port at which nobody listens: it was free a moment ago."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}/v1"


# --- what goes well ---------------------------------------------------------------------------------------------------


def test_cold_is_apart_from_warm(spanwire: Spanwire, server: LoopbackServer) -> None:
    found = spanwire("probe", server.url, "--model", "m", "-n", "4")
    assert (found.exit_code, found.stderr) == (0, "")
    assert max(map(len, found.stdout.splitlines())) <= 80
    head = lines(found.stdout)
    assert found.stdout.startswith(f"m at 127.0.0.1:{server.port} over sse\n")
    assert head["calls"].startswith("4 ok, 0 failed in ")
    assert head["connections"] == "1 opened; 1 cold call, 3 warm"
    assert "as the server counted them" in head["tokens"]
    assert columns(found.stdout) == ["source", "cold", "warm", "p50", "max"]
    assert len(head["total"].split()) == 4
    assert len(head["handshake"].split()) == 2  # the warm ones have none
    assert "nearest-rank" in found.stdout
    assert server.connections == 1
    assert len(server.requests) == 4


@pytest.mark.parametrize(("calls", "expected"), [(1, []), (2, ["p50", "max"]), (20, ["p50", "p95", "max"])])
def test_percentiles_only_where_there_are_calls_enough(
    spanwire: Spanwire, server: LoopbackServer, calls: int, expected: list[str]
) -> None:
    found = spanwire("probe", server.url, "--model", "m", "-n", str(calls), "--cold")
    assert columns(found.stdout) == ["source", "cold", *expected]
    assert ("nearest-rank" in found.stdout) == (calls > 1)


def test_p99_from_100_calls_on(spanwire: Spanwire, server: LoopbackServer) -> None:
    found = spanwire("probe", server.url, "--model", "m", "-n", "101", "--unary")
    assert columns(found.stdout) == ["source", "cold", "warm", "p50", "p95", "p99"]
    assert "too few" not in found.stdout


def test_the_shape_of_the_json(spanwire: Spanwire, server: LoopbackServer) -> None:
    server.script(Script.say("one two three four", prefill_s=0.002, gap_s=0.001))
    found = spanwire("probe", server.url, "--model", "m", "-n", "3", "--json")
    assert (found.exit_code, found.stderr) == (0, "")
    data = json.loads(found.stdout)
    timelines = data.pop("timelines")
    cold, warm = data.pop("cold"), data.pop("warm")
    tokens = data.pop("tokens")
    assert data.pop("elapsed_s") > 0
    assert data.pop("spanwire")
    assert data == {
        "schema": 1,
        "url": server.url,
        "endpoint": f"127.0.0.1:{server.port}",
        "transport": "sse",
        "model": "m",
        "streamed": True,
        "concurrency": 1,
        "every_call_cold": False,
        "interrupted": False,
        "gave_up": False,
        "connections_opened": 1,
        "calls": {"planned": 3, "ok": 3, "failed": 0, "errors": {}},
        "percentiles": "nearest-rank",
    }
    assert (tokens["output"], tokens["source"]) == (12, "usage")
    assert tokens["per_second"] > 0
    assert (cold["calls"], warm["calls"]) == (1, 2)
    for group in (cold, warm):
        for name in ("total", "first_byte", "first_chunk", "first_content"):
            assert group[name].keys() == {"n", "min_s", "mean_s", "p50_s", "max_s"}
            assert group[name]["n"] == group["calls"]
            assert 0 < group[name]["min_s"] <= group[name]["p50_s"] <= group[name]["max_s"]
        for segment in group["segments"].values():
            assert segment["source"] in {"measured", "reported", "estimated"}
            for part in segment.get("parts", {}).values():
                assert part.keys() == {"source", "n", "min_s", "mean_s", "p50_s", "max_s"}
    assert "tcp" in cold["segments"]["handshake"]["parts"]
    assert "handshake" not in warm["segments"]
    assert len(timelines) == 3
    for timeline in timelines:
        known = sum(segment["duration_s"] for segment in timeline["segments"].values())
        assert known == pytest.approx(timeline["total_s"], abs=1e-3)


def test_cold_takes_a_connection_for_each_call(spanwire: Spanwire, server: LoopbackServer) -> None:
    data = json.loads(spanwire("probe", server.url, "-m", "m", "-n", "3", "--cold", "--json").stdout)
    assert (data["connections_opened"], data["cold"]["calls"], data["every_call_cold"]) == (3, 3, True)
    assert "warm" not in data
    assert server.connections == 3


def test_some_calls_at_once(spanwire: Spanwire, server: LoopbackServer) -> None:
    server.script(Script.say("hello", queue_s=0.02))
    found = spanwire("probe", server.url, "-m", "m", "-n", "8", "-c", "4", "--json")
    data = json.loads(found.stdout)
    assert (data["calls"]["ok"], data["concurrency"], data["connections_opened"]) == (8, 4, 4)
    assert server.connections == 4


def test_unary(spanwire: Spanwire, server: LoopbackServer) -> None:
    found = spanwire("probe", server.url, "-m", "m", "-n", "2", "--unary")
    assert found.exit_code == 0
    assert "not streamed" in found.stdout
    assert not any(request.body.get("stream") for request in server.requests)


def test_tokens_are_counted_here_if_the_server_does_not(spanwire: Spanwire, server: LoopbackServer) -> None:
    server.script(Script.say("one two three", usage=None))
    found = spanwire("probe", server.url, "-m", "m", "-n", "2")
    assert lines(found.stdout)["tokens"].startswith("6 (counted as pieces of content")


def test_what_is_sent(spanwire: Spanwire, server: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", "acme")
    options = ["--prompt", "Why?", "--max-tokens", "7", "-H", "X-Team: search: eu", "--api-key-env", "ACME_KEY"]
    assert spanwire("probe", server.url, "-m", "m", "-n", "1", *options).exit_code == 0
    (request,) = server.requests
    assert request.body["messages"] == [{"role": "user", "content": "Why?"}]
    assert request.body["max_tokens"] == 7
    assert request.headers["x-team"] == "search: eu"
    assert request.headers["authorization"] == "Bearer acme"


def test_keys_go_only_where_they_belong(
    spanwire: Spanwire, server: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    assert spanwire("probe", server.url, "-m", "m", "-n", "1").exit_code == 0
    monkeypatch.setenv("SPANWIRE_API_KEY", "ours")
    assert spanwire("probe", server.url, "-m", "m", "-n", "1").exit_code == 0
    assert [request.headers.get("authorization") for request in server.requests] == [None, "Bearer ours"]


def test_the_key_of_openai_is_for_openai(spanwire: Spanwire, monkeypatch: pytest.MonkeyPatch) -> None:
    from spanwire import Endpoint
    from spanwire.cli.app import _api_key

    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    assert _api_key(Endpoint("https://api.openai.com/v1"), None) == "of-openai"
    assert _api_key(Endpoint("https://api.openai.com.acme.example/v1"), None) is None


def test_a_servers_certificate(spanwire: Spanwire) -> None:
    with LoopbackServer(tls=True) as server:
        assert server.ca is not None
        for trust in (["--ca", server.ca], ["--insecure"]):
            found = spanwire("probe", server.url, "-m", "m", "-n", "2", *trust)
            assert (found.exit_code, found.stderr) == (0, "")
            assert "  tls " in found.stdout
        found = spanwire("probe", server.url, "-m", "m", "-n", "2")
        assert (found.exit_code, found.stdout) == (1, "")
        assert "ConnectionFailed" in found.stderr
        assert "--insecure" in found.stderr
        assert found.stderr.count("\n") == 1


def test_a_progress_bar_only_on_a_terminal(spanwire: Spanwire, server: LoopbackServer) -> None:
    ours, theirs = pty.openpty()
    process = spanwire.start("probe", server.url, "-m", "m", "-n", "3", stderr=theirs)
    os.close(theirs)
    out, _ = process.communicate(timeout=30)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    assert process.returncode == 0
    assert b"3/3" in shown
    assert out.startswith("m at 127.0.0.1")
    assert "\x1b" not in out


# --- what does not ----------------------------------------------------------------------------------------------------


def test_some_failures_are_counted_and_the_rest_reported(spanwire: Spanwire, server: LoopbackServer) -> None:
    server.script(Script.say("fine"), times=1)
    server.script(Script(status=429), times=2)
    server.script(Script.say("fine"))
    found = spanwire("probe", server.url, "-m", "m", "-n", "5")
    assert found.exit_code == 0
    head = lines(found.stdout)
    assert head["calls"].startswith("3 ok, 2 failed in ")
    assert head["failed"].startswith("2 x RateLimited: ")
    assert len(server.requests) == 5  # none was tried again


def failure(found: Any, code: int = 1) -> str:
    """The one line on stderr of a run in which nothing went well."""
    assert (found.exit_code, found.stdout) == (code, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith("spanwire: ")
    return str(line)


def test_nobody_listens(spanwire: Spanwire) -> None:
    line = failure(spanwire("probe", refused(), "-m", "m", "-n", "20"))
    assert "the first 3 calls of 20 failed, the others were not tried: ConnectionFailed: " in line
    assert "refused" in line


def test_nobody_listens_as_json(spanwire: Spanwire) -> None:
    found = spanwire("probe", refused(), "-m", "m", "-n", "2", "--json")
    assert found.exit_code == 1
    data = json.loads(found.stdout)
    assert (data["calls"]["ok"], data["calls"]["failed"], data["gave_up"]) == (0, 2, False)
    assert data["calls"]["errors"]["ConnectionFailed"]["count"] == 2
    assert not {"cold", "warm", "tokens"} & data.keys()
    assert "all 2 calls failed" in found.stderr


@pytest.mark.parametrize(("status", "words"), [(401, "AuthenticationFailed"), (400, "BadRequest")])
def test_what_cannot_help_is_not_repeated(spanwire: Spanwire, server: LoopbackServer, status: int, words: str) -> None:
    server.script(Script(status=status))
    line = failure(spanwire("probe", server.url, "-m", "m", "-n", "9"))
    assert f"the first call of 9 failed, the others were not tried: {words}: " in line
    assert ("--api-key-env" in line) == (status == 401)
    assert len(server.requests) == 1


def test_a_server_gives_the_terminal_no_orders(spanwire: Spanwire, server: LoopbackServer) -> None:
    server.script(Script(status=400, body=json.dumps({"error": {"message": "\x1b]0;all right\x07\x9b2J"}}).encode()))
    line = failure(spanwire("probe", server.url, "-m", "m", "-n", "1"))
    assert "BadRequest: \\u001b]0;all right\\u0007\\u009b2J" in line


def test_a_base_url_without_its_end(spanwire: Spanwire, server: LoopbackServer) -> None:
    server.script(Script(status=404, body=b'{"detail": "Not Found"}'))
    line = failure(spanwire("probe", f"{server.origin}/?key=secret", "-m", "m", "-n", "1"))
    assert "the server's base URL, which ends in /v1 with most servers?" in line
    assert "secret" not in line
    assert "/v1" not in failure(spanwire("probe", server.url, "-m", "m", "-n", "1"))


def test_a_call_takes_too_long(spanwire: Spanwire, server: LoopbackServer) -> None:
    server.script(Script(hang_after="request"))
    line = failure(spanwire("probe", server.url, "-m", "m", "-n", "1", "--timeout", "0.05"))
    assert "the call failed: CallTimeout: " in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense", "-m", "m"], "no scheme and host"),
        (["htp://127.0.0.1/v1", "-m", "m"], "did you mean 'http'?"),
        (["http://u:p@127.0.0.1/v1", "-m", "m"], "user name or password"),
        (["http://127.0.0.1:99999/v1", "-m", "m"], "cannot be read"),
        (["http://127.0.0.1/v1", "-m", ""], "model"),
        (["http://127.0.0.1/v1", "-m", "m", "-H", "a b: c"], "header"),
        (["https://127.0.0.1/v1", "-m", "m", "--ca", __file__], "CA certificates"),
    ],
)
def test_a_mistake_is_one_line(spanwire: Spanwire, arguments: list[str], words: str) -> None:
    assert words in failure(spanwire("probe", *arguments), 2)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-m", "m", "-n", "0"],
        ["-m", "m", "-c", "0"],
        ["-m", "m", "-H", "no colon"],
        ["-m", "m", "--ca", "/no/such/file"],
        ["-m", "m", "--api-key-env", "NO_SUCH_VARIABLE"],
    ],
)
def test_wrong_usage(spanwire: Spanwire, arguments: list[str]) -> None:
    found = spanwire("probe", "http://127.0.0.1:1/v1", *arguments)
    assert (found.exit_code, found.stdout) == (2, "")
    assert "Usage: spanwire probe" in found.stderr


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def interrupted(spanwire: Spanwire, server: LoopbackServer, good: int, *options: str) -> tuple[int, str, str]:
    """Some calls go well, the next one hangs, and is interrupted."""
    if good:
        server.script(Script.say("hello"), times=good)
    server.script(Script(hang_after="request"))
    process = spanwire.start("probe", server.url, "-m", "m", "-n", "50", *options)
    try:
        server.wait_for(lambda server: len(server.requests) == good + 1, 20)
        return spanwire.interrupt(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_ctrl_c_shows_what_there_is(spanwire: Spanwire, server: LoopbackServer) -> None:
    code, out, err = interrupted(spanwire, server, 3)
    assert (code, err) == (130, "")
    head = lines(out)
    assert head["calls"].startswith("3 ok, 0 failed of 50 planned in ")
    assert head["calls"].endswith("(interrupted)")
    assert "total" in head


def test_ctrl_c_with_json(spanwire: Spanwire, server: LoopbackServer) -> None:
    code, out, err = interrupted(spanwire, server, 2, "--json", "--cold")
    assert (code, err) == (130, "")
    data = json.loads(out)
    assert data["interrupted"] is True
    assert (data["calls"]["planned"], data["calls"]["ok"]) == (50, 2)
    assert len(data["timelines"]) == 2


def test_ctrl_c_before_there_is_anything(spanwire: Spanwire, server: LoopbackServer) -> None:
    assert interrupted(spanwire, server, 0) == (130, "", "spanwire: interrupted before a call had ended\n")
