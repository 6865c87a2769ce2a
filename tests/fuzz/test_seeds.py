"""Every input that the fuzzer keeps, without the fuzzer: what it found once is not to come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import fuzz_http1, fuzz_openai_chat, fuzz_sse

SEEDS = Path(__file__).parents[2] / "fuzz" / "seeds"
TARGETS = {"sse": fuzz_sse.check, "openai_chat": fuzz_openai_chat.check, "http1": fuzz_http1.check}


@pytest.mark.parametrize("name", sorted(path.relative_to(SEEDS).as_posix() for path in SEEDS.glob("*/*")))
def test_seed(name: str) -> None:
    TARGETS[name.partition("/")[0]]((SEEDS / name).read_bytes())


def test_each_target_has_seeds() -> None:
    assert {path.name for path in SEEDS.iterdir()} == set(TARGETS)
    assert len(list(SEEDS.glob("*/*"))) < 300, "a corpus belongs elsewhere: keep what is small and different"
