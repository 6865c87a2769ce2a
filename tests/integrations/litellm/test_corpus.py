"""The corpus through LiteLLM: nothing lost, and no success where there was none."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from spanwire.testing import LoopbackServer
from tests.cases.test_wire import EXPECTED, KINDS, script
from tests.integrations.litellm.support import WAYS, ask, ours, to

CUTS = {"acompletion stream": ("paused", "whole", "bytes")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_answer_is_what_the_server_gave(name: str, way: str, server: LoopbackServer) -> None:
    expected = EXPECTED[name]
    for cut in CUTS.get(way, ("whole",)):
        server.clear()
        server.script(script(name, cut), model="m")
        seen = ask(way, to(server))
        if expected["error"] is not None:
            check_error(expected["error"], seen.error)
            assert sum(request.model == "m" for request in server.requests) == 1
            assert seen.finish_reason is None if seen.chunks else seen.response is None
            if "stream" in way:
                assert seen.text == expected["text"]
            assert seen.report is not None
            assert seen.report["outcome"] == expected["outcome"]
            continue
        assert seen.error is None
        assert seen.text == expected["text"]
        assert [(t[0], t[1], json.loads(t[2] or "null")) for t in seen.tools] == [
            (t["id"], t["name"], json.loads(t["arguments"] or "null")) for t in expected["tool_calls"]
        ]
        assert seen.report is not None
        assert seen.report["outcome"] == expected["outcome"]
        check_end(expected, seen.finish_reason, seen.report)
        if expected["usage"] is not None:
            assert seen.usage == tuple(expected["usage"][f"{n}_tokens"] for n in ("input", "output", "total"))
            assert "usage_source" not in seen.report
        elif "stream" in way:
            assert seen.report["usage_source"] == "estimated"
        else:
            assert (seen.usage, seen.report["usage_source"]) == (None, "unknown")


def check_end(expected: dict[str, Any], finish_reason: str | None, report: dict[str, Any]) -> None:
    if expected["finish_reason"] is None:
        assert (finish_reason, report["finish_reason"]) == ("stop", "assumed")
    else:
        assert (finish_reason, report.get("finish_reason")) == (expected["finish_reason"], None)


def check_error(expected: dict[str, Any], error: Any) -> None:
    assert error is not None, "no error"
    kinds = expected["kind"] if isinstance(expected["kind"], list) else [expected["kind"]]
    assert isinstance(ours(error), tuple(KINDS[kind] for kind in kinds))
    assert expected.get("message", "") in str(error)
    status = expected.get("status") or expected.get("code")
    if isinstance(status, int):
        assert error.status_code == status
    assert isinstance(getattr(error, "original_exception", None) or error, tuple(litellm.LITELLM_EXCEPTION_TYPES))
