"""LiteLLM asks the network for a list of prices when it is imported, unless this is set."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from collections.abc import Iterator
from pathlib import Path

import litellm
import litellm_spanwire
import pytest

from spanwire.testing import LoopbackServer

litellm.suppress_debug_info = True  # it prints about itself when an error is raised


#: Warnings about LiteLLM's own code. What is left behind, or never awaited, is an error here too.
_ITS_OWN = (r"ignore:Items? .* the `ReadOnly` qualifier:UserWarning", "ignore::DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for line in _ITS_OWN:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """With the process's default managers, and nobody else's callbacks."""
    litellm_spanwire.register()
    yield
    litellm_spanwire.handler.use(None)
    for callbacks in (
        litellm.callbacks,
        litellm.input_callback,
        litellm.success_callback,
        litellm.failure_callback,
        litellm._async_success_callback,
        litellm._async_failure_callback,
        litellm._async_input_callback,
    ):
        callbacks.clear()


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as running:
        yield running
    assert running.faults == []
