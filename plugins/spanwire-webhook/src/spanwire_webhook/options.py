"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["StoreOption"]

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="SPANWIRE_STORE",
        metavar="URL",
        help="Where jobs are: sqlite:///jobs.db, postgresql://..., redis://... By default where programs keep them that name none.",
        show_default=False,
    ),
]
