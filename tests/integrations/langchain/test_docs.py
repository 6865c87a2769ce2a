"""docs/langchain.md tells about each field of ChatOpenAI, and tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

from langchain_openai import ChatOpenAI
from langchain_spanwire import ChatSpanwire
from langchain_spanwire.names import REPLACED, known_names

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (`[^|]+) \| (same|renamed|refused)[^|]* \|", re.MULTILINE)


def rows() -> dict[str, str]:
    table = (ROOT / "docs" / "langchain.md").read_text("utf-8").split("## From ChatOpenAI")[1]
    return {name: what for names, what in ROW.findall(table) for name in re.findall(r"`(\w+)`", names)}


def test_every_field_is_in_the_table() -> None:
    assert rows().keys() >= set(ChatOpenAI.model_fields)


def test_the_table_is_true() -> None:
    ours = known_names(ChatSpanwire)
    for name, what in rows().items():
        if what == "same":
            assert name in ours, name
        elif what == "refused":
            assert name in REPLACED, name
            assert name not in ours
        else:
            assert name in REPLACED or name in ours, name


def test_the_readme_of_the_distribution_runs() -> None:
    from tests.test_examples import BLOCK, SERVER, run

    (block,) = BLOCK.findall((ROOT / "integrations" / "langchain-spanwire" / "README.md").read_text("utf-8"))
    start = "from spanwire.testing import LoopbackServer\n_server = LoopbackServer().start()\n"
    done = run(start + SERVER.sub("_server.url", block))
    assert (done.returncode, done.stderr) == (0, "")
