"""The conformance kit: tests that every transport, and every dialect, has to pass. Needs pytest (``spanwire[testing]``).

An author subclasses :class:`TransportConformance` in a test file, and says what the transport is and how a script is
served over its wire; pytest finds the tests::

    from spanwire.testing import TransportConformance


    class TestEcho(TransportConformance):
        scheme = "echo"  # an installed plugin is found by it
        part = "echo"  # the server: a part of the loopback server (spanwire.loopback)
        cannot = {"reset": "the wire is a pipe, which knows no reset"}

Each test's docstring says what it proves and where to look when it fails. What a wire cannot do is declared in ``cannot``,
by a name of :data:`ABILITIES`, and is reported as an expected failure with that reason. A test that is overridden needs
``@pytest.mark.xfail(reason=...)``.

What keeps jobs has :class:`StoreConformance`::

    from spanwire.testing import StoreConformance


    class TestMyStore(StoreConformance):
        def url(self, tmp_path):
            return f"mystore://{tmp_path}"
"""

from __future__ import annotations

from ...errors import ConfigurationError

try:
    import pytest
except ImportError as error:
    raise ConfigurationError("the conformance kit needs pytest: pip install 'spanwire[testing]'") from error

_MODULES = (
    "answers",
    "dialect",
    "dialling",
    "failures",
    "harness",
    "leaving",
    "limits",
    "loops",
    "pressure",
    "privacy",
    "registration",
    "segments",
    "store",
)
# Before they are imported: pytest shows the values in a failed assert only of what it has rewritten.
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _MODULES))

from .abilities import ABILITIES  # noqa: E402
from .dialect import DialectConformance  # noqa: E402
from .harness import Served  # noqa: E402
from .store import StoreConformance  # noqa: E402
from .transport import TransportConformance  # noqa: E402

__all__ = ["ABILITIES", "DialectConformance", "Served", "StoreConformance", "TransportConformance"]
