"""LangChain over spanwire: :class:`ChatSpanwire` and :class:`SpanwireEmbeddings`.

::

    from langchain_spanwire import ChatSpanwire

    model = ChatSpanwire(model="my-model", endpoint="http://127.0.0.1:8000/v1")
    message = model.invoke("Say hello")
    print(message.response_metadata["spanwire"]["segments"])

Connections are the process's, not the model's: every model object shares them, whatever their number, in synchronous
code and on any event loop. Errors are those of :mod:`spanwire.errors`, and LangChain's model errors too.
"""

from __future__ import annotations

from .chat import ChatSpanwire
from .embeddings import SpanwireEmbeddings

__all__ = ["ChatSpanwire", "SpanwireEmbeddings"]
