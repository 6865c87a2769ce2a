"""Makes sockets for ``ws://`` and ``wss://`` endpoints, for the dialect that the endpoint speaks."""

from __future__ import annotations

from collections.abc import Hashable

from spanwire.calls import Call
from spanwire.endpoint import Endpoint
from spanwire.errors import ConfigurationError
from spanwire.net.dial import route_of
from spanwire.net.tls import context_for
from spanwire.transport import Attempt, Connection, Dialect
from spanwire.wire.openai_responses import custom_tools, encode_responses

from .chat import ChatConnection
from .conversation import Outgoing, outgoing
from .options import options_of
from .session import SessionConnection, SessionDialect
from .upgrade import closed_at_once, open_socket

__all__ = ["RESPONSES_PATH", "WebSocketTransport"]

#: Below the endpoint's base URL. Source: OpenAI's guide "WebSocket mode".
RESPONSES_PATH = "/responses"
_ALPN = ("http/1.1",)  # the upgrade is one of HTTP/1.1: RFC 6455 section 4.1


class WebSocketTransport:
    """One socket carries one response at a time; what its server remembers of the conversation is not sent again."""

    def expect(self, endpoint: Endpoint) -> int:
        """One exchange at once."""
        return 1

    def key(self, endpoint: Endpoint) -> Hashable:
        """The handshake sends path, query, headers and credentials, so endpoints that differ in them share no socket."""
        options = options_of(endpoint)
        if endpoint.dialect == "responses":
            _check_base(endpoint)
        if endpoint.secure:
            context_for(endpoint.tls, alpn=_ALPN)  # refuses bad files here
        return (
            endpoint.connection_key(),
            endpoint.path,
            tuple(endpoint.query.items()),
            tuple(sorted((name.lower(), value) for name, value in endpoint.headers.items())),
            endpoint.api_key,
            endpoint.dialect,
            options,
            endpoint.limits.max_event_bytes,
            route_of(endpoint).key,
        )

    def prepare(self, call: Call, endpoint: Endpoint, dialect: Dialect | None) -> Outgoing:
        """The call, encoded, in items that can be compared with what a socket's server remembers.

        Raises:
            ConfigurationError: what the schema cannot say, or JSON; the endpoint has the path of one operation.
        """
        _check_base(endpoint)
        request = encode_responses(call.body, call.model)
        if request.pop("background", None):
            raise ConfigurationError(
                "background: an answer on a WebSocket is a stream and nothing else; leave it out",
                endpoint=endpoint.address,
            )
        try:
            return outgoing(request, custom_tools(call.body))
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigurationError(
                f"the call cannot be written as JSON: {error}; parameters must be text, numbers, lists and mappings",
                endpoint=endpoint.address,
            ) from error

    async def connect(self, endpoint: Endpoint, attempt: Attempt) -> Connection:
        """Dial and upgrade. Raises as :func:`~spanwire_websocket.upgrade.open_socket` does."""
        options = options_of(endpoint)
        query = list(endpoint.query.items())
        dialect = attempt.dialect
        if dialect is not None and dialect.codec is not None:
            codec: SessionDialect = dialect.codec
            socket = await open_socket(endpoint, attempt, codec.path(endpoint.path), query, options)
            if socket.lost is not None:
                socket.abort()
                raise closed_at_once(endpoint, socket)
            return SessionConnection(socket, codec, buffer_bytes=options.buffer_bytes)
        _check_base(endpoint)  # of one that is only warmed, too
        socket = await open_socket(endpoint, attempt, endpoint.path + RESPONSES_PATH, query, options)
        connection = ChatConnection(socket, max_age_s=options.max_age_s, remembers=options.continue_conversations)
        try:
            connection.check(endpoint)
        except BaseException:
            connection.abort()
            raise
        return connection


def _check_base(endpoint: Endpoint) -> None:
    """For chat. A session's schema has a path of its own."""
    if endpoint.path.endswith(RESPONSES_PATH):
        raise ConfigurationError(
            f"the endpoint's URL is the server's base URL: remove {RESPONSES_PATH!r} from its end",
            endpoint=endpoint.address,
        )
