"""docs/grpc.md names what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from spanwire_grpc import register_dialects, register_transports
from spanwire_grpc.oip import SERVERS
from spanwire_grpc.status import _KINDS
from spanwire_grpc.vllm import MAX_NEW_TOKENS

PAGE = (Path(__file__).parents[3] / "docs/grpc.md").read_text(encoding="utf-8")

(SPEC,) = register_transports()
OPTIONS = SPEC.options.union(*(dialect.options for dialect in register_dialects()))


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_every_option(option: str) -> None:
    assert f"`{option}`" in PAGE or f'"{option}"' in PAGE


def test_every_dialect_and_every_server() -> None:
    for name in (*(dialect.name for dialect in register_dialects()), *SERVERS):
        assert name in PAGE.lower()
    assert str(MAX_NEW_TOKENS) in PAGE


def test_statuses_that_are_tried_again() -> None:
    for code, (_, retryable) in _KINDS.items():
        assert not retryable or code in PAGE
