"""langchain-tests' standard suites: nothing fails, and what is skipped is named here, with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integrations.langchain.standard_suites import run_suite

#: Skipped because of what the model is, not of what it lacks.
SKIPPED = {
    # A class outside of langchain-core's own mapping cannot be loaded from its serialized form.
    "unit": {"test_serdes"},
    # Measures with recorded answers (VCR records HTTP clients that we do not use); benchmarks/ measures for real.
    "integration": {"test_stream_time"},
    # The Responses API has neither.
    "responses": {"test_stream_time", "test_stop_sequence", "test_audio_inputs"},
}
#: As of langchain-tests 1.1.9; more in newer ones.
AT_LEAST = {"unit": 12, "integration": 100, "responses": 90}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("unit", "sse"),
        ("integration", "sse"),
        pytest.param("integration", "grpc", marks=pytest.mark.long),
        pytest.param("responses", "sse", marks=pytest.mark.long),
        pytest.param("responses", "websocket", marks=pytest.mark.long),
    ],
)
def test_the_suite_passes(name: str, part: str, tmp_path: Path) -> None:
    outcome, output = run_suite(name, tmp_path, python=sys.executable, part=part)
    assert not outcome.counts["failure"], output
    assert not outcome.counts["error"], output
    assert outcome.skipped == SKIPPED[name], output
    assert outcome.counts["passed"] >= AT_LEAST[name], output
