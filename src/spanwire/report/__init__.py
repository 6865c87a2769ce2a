"""From what an observer or an OTLP file wrote to one page that explains it: what ``spanwire report`` does.

* :mod:`.read`: files to calls. :mod:`.calls` has their one form, :mod:`.otlp` what spans say.
* :mod:`.summary`: PURE: calls to numbers. :mod:`.findings`: the numbers to sentences.
* :mod:`.page`: the numbers to HTML. ``assets/`` has the page's style and script, and uPlot, which draws the charts.
"""

from __future__ import annotations

from .build import Report, build

__all__ = ["Report", "build"]
