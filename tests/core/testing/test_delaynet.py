"""Commands on a delay network: what they get, what their callers get, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwire.errors import ConfigurationError
from spanwire.testing import LoopbackServer, delaynet
from spanwire.testing.delaynet import PEER, main, run_delayed, turned

needs_network = pytest.mark.usefixtures("network")
#: A start with everything imported takes less than a second, so more is a hang.
PROCESS_S = 20.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def network() -> None:
    reason = delaynet.available()
    if reason is not None:
        pytest.skip(reason)


# --- packets ----------------------------------------------------------------------------------------------------------


def checksum(data: bytes) -> int:
    """RFC 1071; 0 over data that has its own, right checksum in it."""
    words = struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2))
    total: int = sum(words)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def udp_sum(packet: bytes) -> int:
    return checksum(packet[12:20] + struct.pack("!BBH", 0, 17, len(packet) - 20) + packet[20:])


addresses = st.binary(min_size=4, max_size=4)


@given(addresses, addresses, st.binary(max_size=200))
def test_a_turned_packet_comes_from_where_it_went_and_its_checksums_are_right(
    source: bytes, target: bytes, payload: bytes
) -> None:
    datagram = struct.pack("!HHHH", 4000, 5000, 8 + len(payload), 0) + payload
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(datagram), 7, 0, 64, 17, 0) + source + target
    sums = struct.pack("!H", checksum(header)), struct.pack("!H", udp_sum(header + datagram))
    packet = header[:10] + sums[0] + header[12:] + datagram[:6] + sums[1] + datagram[8:]
    assert checksum(packet[:20]) == udp_sum(packet) == 0

    back = turned(packet)

    assert back is not None
    assert (back[12:16], back[16:20], back[28:]) == (target, source, payload)
    assert checksum(back[:20]) == udp_sum(back) == 0
    assert turned(back) == packet


@pytest.mark.parametrize("packet", [b"", b"\x45" * 19, b"\x60" + b"\0" * 60], ids=["empty", "short", "IPv6"])
def test_what_is_no_ipv4_packet_is_not_turned(packet: bytes) -> None:
    assert turned(packet) is None


# --- arguments, and where there can be none ---------------------------------------------------------------------------


@pytest.mark.parametrize("rtt_s", [-0.001, float("nan"), 40, True, "0.04"])
def test_an_impossible_round_trip_is_refused(rtt_s: float) -> None:
    with pytest.raises(ConfigurationError, match="rtt_s"):
        run_delayed(["true"], rtt_s=rtt_s)


@pytest.mark.parametrize("command", ["python script.py", []])
def test_a_command_is_a_list(command: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="list"):
        run_delayed(command)


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "no command"), (["--rtt-ms", "-1", "--", "true"], "--rtt-ms must be")]
)
def test_a_bad_command_line_is_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert words in capsys.readouterr().err


def test_other_systems_get_a_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    delaynet.available.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    try:
        reason = delaynet.available()
        assert reason is not None
        assert "Linux" in reason
        with pytest.raises(ConfigurationError, match="Linux"):
            run_delayed(["true"])
        assert main(["--", "true"]) == 125
        assert "Linux" in capsys.readouterr().err
    finally:
        delaynet.available.cache_clear()


def test_the_loopback_server_has_a_public_address() -> None:
    with LoopbackServer(host="0.0.0.0", public_host=PEER) as server:
        assert server.url == f"http://{PEER}:{server.port}/v1"
        assert server.endpoint().url == server.url
        socket.create_connection(("127.0.0.1", server.port)).close()


# --- commands ---------------------------------------------------------------------------------------------------------


@needs_network
def test_a_command_writes_and_exits_as_it_would_elsewhere(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['X']); print('oops', file=sys.stderr); sys.exit(7)"
    done = run_delayed(python(code), env={**os.environ, "X": "1"}, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{tmp_path} 1\n", "oops\n")


@needs_network
def test_a_signal_and_a_missing_command_have_the_usual_exit_codes(tmp_path: Path) -> None:
    assert run_delayed(python("import os; os.kill(os.getpid(), 9)")).returncode == 128 + 9
    assert run_delayed([str(tmp_path / "nothing")]).returncode == 127
    assert run_delayed([str(tmp_path)]).returncode == 126


@needs_network
def test_a_command_keeps_its_own_two_dashes() -> None:
    done = run_delayed([*python("import sys; print(sys.argv[1:])"), "a", "--", "--rtt-ms"])
    assert done.stdout == "['a', '--', '--rtt-ms']\n"


@needs_network
def test_inside_there_is_the_peer_and_this_machine_and_nothing_else() -> None:
    code = f"""
        import socket
        with socket.create_server(("0.0.0.0", 0)) as server:
            for host in ("{PEER}", "127.0.0.1"):
                with socket.create_connection((host, server.getsockname()[1])) as client:
                    connection, (seen, _) = server.accept()
                    with connection:
                        client.sendall(b"x")
                        assert connection.recv(1) == b"x"
                        print(seen)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                try:
                    other.connect(("192.0.2.1", 9))
                except OSError as error:
                    print(error.strerror)
    """
    before = Path("/proc/self/ns/net").readlink()
    done = run_delayed(python("if True:" + code), rtt_s=0.001)
    assert done.stderr == ""
    assert done.stdout.split("\n") == [PEER, "127.0.0.1", "Network is unreachable", ""]
    assert Path("/proc/self/ns/net").readlink() == before


@needs_network
def test_tls_over_the_peer_is_trusted_like_any_other() -> None:
    code = f"""
        import asyncio, spanwire
        from spanwire.testing import LoopbackServer
        async def main():
            with LoopbackServer(host="0.0.0.0", public_host="{PEER}", tls=True) as server:
                async with spanwire.ConnectionManager() as manager:
                    call = spanwire.Call.chat("m", [{{"role": "user", "content": "x"}}])
                    print((await manager.complete(server.endpoint(), call)).text)
        asyncio.run(main())
    """
    done = run_delayed(python("if True:" + code), rtt_s=0.001)
    assert (done.stdout, done.stderr) == ("You said: x\n", "")


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def wait_for_end(pid: int) -> None:
    """A killed process is gone in a moment, yet not in the same one."""
    until = time.monotonic() + PROCESS_S
    while Path(f"/proc/{pid}").exists():
        # Nobody but init may have to take note of its end.
        if Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z":
            return
        assert time.monotonic() < until, "the command goes on"
        time.sleep(0.01)


def waiting() -> tuple[subprocess.Popen[str], int]:
    runner = subprocess.Popen(
        [sys.executable, "-m", "spanwire.testing.delaynet", "--", *python(WAITS)], stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    return runner, int(runner.stdout.readline())


@needs_network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command(number: signal.Signals) -> None:
    runner, pid = waiting()
    with runner:
        runner.send_signal(number)
        assert runner.wait(PROCESS_S) == 128 + number
        wait_for_end(pid)


@needs_network
def test_a_command_does_not_outlive_its_network() -> None:
    runner, pid = waiting()
    with runner:
        runner.kill()
        assert runner.wait(PROCESS_S) == -signal.SIGKILL
        wait_for_end(pid)


@needs_network
def test_a_command_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_delayed(python(WAITS), timeout_s=3)
    assert caught.value.stdout is not None
    wait_for_end(int(caught.value.stdout))


# --- several peers, a limited rate, a record ---------------------------------------------------------------------------

EDGE = "198.18.0.3"
#: One byte to each host on the command line, and back. An echo server, since it is the same kernel on both sides.
ECHOES = """
if True:
    import socket, sys, threading, time
    with socket.create_server(("0.0.0.0", 0)) as server:
        for host in sys.argv[1:]:
            with socket.create_connection((host, server.getsockname()[1])) as client:
                connection, (seen, _) = server.accept()
                with connection:
                    for _ in range(9):
                        client.sendall(b"x")
                        connection.sendall(connection.recv(1))
                        client.recv(1)
                print(seen)
"""


@needs_network
def test_each_peer_has_a_distance_of_its_own_and_each_packet_is_recorded(tmp_path: Path) -> None:
    record = tmp_path / "packets"
    begin_ns = time.perf_counter_ns()
    done = run_delayed(
        [*python(ECHOES), PEER, EDGE],
        rtt_s=0.030,
        peers={EDGE: delaynet.Link(0.010)},
        record=record,
        timeout_s=PROCESS_S,
    )
    end_ns = time.perf_counter_ns()
    assert (done.stdout.split(), done.stderr) == ([PEER, EDGE], "")
    packets = delaynet.read_record(record)
    for peer, one_way_s in ((PEER, 0.015), (EDGE, 0.005)):
        held_s = sorted(packet.held_s for packet in packets if packet.peer == peer)
        assert len(held_s) >= 3 + 18  # the handshake, and nine each way
        assert held_s[0] > one_way_s - 0.0002  # never earlier; how much later depends on who else uses the machine
    assert all(begin_ns < packet.taken_ns < packet.given_ns < end_ns for packet in packets)
    assert all(20 + 20 < packet.size <= 1500 for packet in packets)


@needs_network
def test_each_packet_of_a_limited_line_waits_for_those_before_it(tmp_path: Path) -> None:
    record = tmp_path / "packets"
    code = f"""
if True:
    import socket
    with socket.socket(type=socket.SOCK_DGRAM) as receiver, socket.socket(type=socket.SOCK_DGRAM) as sender:
        receiver.bind(("0.0.0.0", 0))
        for _ in range(20):
            sender.sendto(bytes(972), ("{PEER}", receiver.getsockname()[1]))
        print(sum(len(receiver.recv(2000)) for _ in range(20)))
"""
    # 1,000 bytes with their headers, at 1 Mbit/s: 8 ms for each.
    done = run_delayed(python(code), rtt_s=0, rate_bit_s=1e6, record=record, timeout_s=PROCESS_S)
    assert (done.stdout, done.stderr) == (f"{20 * 972}\n", "")
    packets = [packet for packet in delaynet.read_record(record) if packet.size == 1000]
    assert len(packets) == 20
    first_ns = packets[0].taken_ns
    assert all(packet.given_ns - first_ns >= 8_000_000 * number for number, packet in enumerate(packets, start=1))


@needs_network
def test_nobody_answers_at_an_address_without_a_link() -> None:
    code = """
if True:
    import socket
    with socket.create_server(("0.0.0.0", 0)) as server:
        try:
            socket.create_connection(("198.18.0.9", server.getsockname()[1]), timeout=0.2)
        except TimeoutError:
            print("silence")
"""
    assert run_delayed(python(code), rtt_s=0.001).stdout == "silence\n"


@needs_network
def test_a_record_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    done = run_delayed(["true"], record=tmp_path / "no" / "where")
    assert done.returncode == 125
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rate_bit_s": 20}, "rate_bit_s"),
        ({"rate_bit_s": float("nan")}, "rate_bit_s"),
        ({"peers": {"198.18.0.1": delaynet.Link(0.01)}}, "198.18.0.1"),
        ({"peers": {"10.0.0.1": delaynet.Link(0.01)}}, "10.0.0.1"),
        ({"peers": {"edge": delaynet.Link(0.01)}}, "edge"),
        ({"peers": {EDGE: delaynet.Link(-1)}}, "rtt_s"),
    ],
)
def test_an_impossible_link_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        run_delayed(["true"], **more)


@pytest.mark.parametrize(
    "arguments", [["--peer", "198.18.0.3"], ["--peer", "x=1"], ["--peer", "198.18.0.3=1,x"], ["--rate-mbit", "0"]]
)
def test_a_bad_link_on_the_command_line_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--", "true"])
    assert "--peer" in capsys.readouterr().err
