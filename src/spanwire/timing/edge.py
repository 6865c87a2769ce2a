"""PURE: does an answer show that something between us and the server ended the connection?

The kernel's round trip is then the one to that edge, and a client cannot see how far the server is behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["is_edge"]

#: Headers that only a hop in between adds. ``via``: RFC 9110 section 7.6.3. The others: Cloudflare, CloudFront, Fastly,
#: Akamai, Azure Front Door, Google's front end, Vercel, Fly.io, Envoy and Istio, Kong, caches (RFC 9211).
_HEADERS = frozenset(
    {
        "akamai-grn",
        "cache-status",
        "cdn-loop",
        "cf-cache-status",
        "cf-ray",
        "fly-request-id",
        "via",
        "x-akamai-request-id",
        "x-amz-cf-id",
        "x-amz-cf-pop",
        "x-azure-ref",
        "x-cache",
        "x-envoy-decorator-operation",
        "x-envoy-upstream-service-time",
        "x-kong-proxy-latency",
        "x-kong-request-id",
        "x-kong-response-latency",
        "x-kong-upstream-latency",
        "x-litellm-call-id",
        "x-served-by",
        "x-vercel-id",
    }
)
#: The same by what ``server`` says.
_SERVERS = frozenset({"awselb/2.0", "cloudflare", "envoy", "istio-envoy", "gws", "esf"})
#: The same by a metric of ``server-timing``.
_METRICS = ("cfEdge", "cfOrigin", "cfL4", "cfReqDur", "gfet4t7")


def is_edge(headers: Mapping[str, str]) -> bool:
    """Whether the answer came through a hop that ends TCP. Names in lower case; False does not prove the contrary."""
    if not _HEADERS.isdisjoint(headers):
        return True
    if headers.get("server", "").lower() in _SERVERS:
        return True
    timing = headers.get("server-timing")
    return timing is not None and any(metric in timing for metric in _METRICS)
