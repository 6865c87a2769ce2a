"""``make fuzz``: one target under atheris. ``python -m fuzz.run sse -max_total_time=600``; README.md says more."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

HERE = Path(__file__).parent
#: What grows while it runs. Not in the repository: a find worth keeping is minimised, named and moved into the seeds.
CORPUS = HERE.parent / ".tools" / "fuzz-corpus"


def main(arguments: list[str]) -> None:
    """Instrument, import, run. What is behind the target's name goes to libFuzzer."""
    names = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.py"))
    if not arguments or arguments[0] not in names:
        sys.exit(f"usage: python -m fuzz.run {{{','.join(names)}}} [libFuzzer's options, or files to replay]")
    name, *options = arguments
    with atheris.instrument_imports(include=["spanwire", "spanwire_sse"]):
        target = importlib.import_module(f"fuzz.fuzz_{name}")
    if all(option.startswith("-") for option in options):
        corpus = CORPUS / name
        corpus.mkdir(parents=True, exist_ok=True)
        words = HERE / "dictionaries" / f"{name}.dict"
        defaults = [f"-dict={words}", f"-artifact_prefix={CORPUS / name}.", "-timeout=10", "-rss_limit_mb=2048"]
        options = [*defaults, *options, str(corpus), str(HERE / "seeds" / name)]
    atheris.Setup([sys.argv[0], *options], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
