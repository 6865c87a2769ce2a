"""What a client's process works out."""

import pytest

from benchmarks import clients


def test_percentiles() -> None:
    ordered = [float(number) for number in range(100)]
    assert [clients.percentile(ordered, share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]
    assert clients.percentile([7.0], 0.99) == 7


def test_tokens_that_have_not_come_are_late_by_the_time_since_they_were_due() -> None:
    delays = clients.Delays()
    delays.added_us.append(100)
    delays.last_ns = 1_000_000
    delays.give_up(4, 20_000, 1_050_000, begun_ns=0)  # due at 1,020, 1,040 and 1,060 us
    assert list(delays.added_us) == [100, 30, 10, 0]


def test_stream_that_never_began_is_late_from_its_beginning() -> None:
    delays = clients.Delays()
    delays.give_up(2, 20_000, 100_000, begun_ns=50_000)
    assert list(delays.added_us) == [30, 10]


def test_peak_begins_anew() -> None:
    before = clients.begin_peak()  # the test runner's own peak may be far above what it has now
    big = b"x" * (64 << 20)
    assert clients.peak_rss_mib() > before + 60
    del big
    now = clients.begin_peak()
    assert 1 < now <= clients.peak_rss_mib()


@pytest.mark.parametrize("model", ["m-200-0-1", "t-200-20000", "f-200"])
def test_tokens_of_a_script(model: str) -> None:
    assert clients.tokens_of(model) == 200
