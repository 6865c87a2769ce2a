"""A certificate authority that lives as long as one server, by trustme (extra ``spanwire[testing]``)."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from ..errors import ConfigurationError

__all__ = ["ThrowAwayCA"]


class ThrowAwayCA:
    """A new authority that nobody trusts by itself; its key never leaves the process.

    Attributes:
        pem: its certificate, to be trusted by clients: ``TLS(ca=authority.pem)``.

    Raises:
        ConfigurationError: trustme is not installed.
    """

    def __init__(self) -> None:
        try:
            import trustme
        except ImportError as error:
            raise ConfigurationError(
                "the loopback server's TLS needs trustme: pip install 'spanwire[testing]'"
            ) from error
        self._authority = trustme.CA()
        self.pem = self._authority.cert_pem.bytes().decode("ascii")

    def server_context(self, *names: str, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """The context of a server.

        Args:
            names: host names and IP addresses that its certificate is for.
            alpn: protocols that it offers, the preferred one first.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(*names).configure_cert(context)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context
