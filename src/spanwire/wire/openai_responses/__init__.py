"""PURE codec of OpenAI's Responses schema: a chat call to a request, events and response objects to chunks.

It serves two transports: server-sent events (``dialect="responses"`` on ``https://``) and WebSocket.
"""

from __future__ import annotations

from .answer import ResponsesDecoder, decode_response
from .failure import response_error
from .items import answer_items, begins_with, input_items
from .request import custom_tools, encode_responses

__all__ = [
    "ResponsesDecoder",
    "answer_items",
    "begins_with",
    "custom_tools",
    "decode_response",
    "encode_responses",
    "input_items",
    "response_error",
]
