"""Embeddings: texts in batches, some of them at once, vectors in the order of the texts."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from langchain_core.embeddings import Embeddings
from pydantic import Field

import spanwire
from spanwire.errors import ConfigurationError, ProtocolError, SpanwireError

from .connected import Connected
from .errors import as_model_error

__all__ = ["SpanwireEmbeddings", "batches_of"]


class SpanwireEmbeddings(Connected, Embeddings):
    """Vectors from any server that spanwire reaches.

    ::

        embeddings = SpanwireEmbeddings(model="my-embedder", endpoint="http://127.0.0.1:8000/v1")
        vectors = embeddings.embed_documents(["one text", "another"])

    Texts are sent as they are: one that is too long for the model is the server's to refuse.

    Raises:
        ConfigurationError: an argument that is no field, or a bad address, key or header.
    """

    model: str = Field(min_length=1)
    """The model's name as the server knows it."""

    dimensions: int | None = Field(default=None, ge=1)
    """Length of the vectors, where the model can have several."""

    encoding_format: Literal["float", "base64"] | None = None
    """How vectors travel; ``base64`` is a third of the size. None leaves it to the server."""

    chunk_size: int = Field(default=256, ge=1)
    """Most texts in one request. OpenAI takes 2,048; text-embeddings-inference 32, unless it was started with more."""

    chunk_bytes: int = Field(default=512 * 1024, ge=1)
    """Most bytes of text in one request; a longer text goes alone. OpenAI takes 300,000 tokens, about twice as much."""

    max_concurrency: int = Field(default=8, ge=1)
    """Most requests of one call at once."""

    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of every request."""

    extra_body: Mapping[str, Any] | None = Field(default=None, repr=False)
    """The same, and the last word over everything else."""

    group: str = ""
    """Where the server answers by jobs (``transport="webhook"``): the name under which the texts of :meth:`embed_documents` are
    kept, so that the same texts, given again after a crash or an error, are embedded only as far as they were not; what has
    failed is tried again, once in each call. Without it what is open is cancelled when the call ends early."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text. Raises what ``spanwire.SyncConnectionManager.embed`` does."""
        if self._by_jobs(texts):
            vectors: list[list[float]] = [[] for _ in texts]
            with self.sync_manager().submit_many(self.endpoint_now(), _Calls(self, texts), **self._how()) as bulk:
                for result in bulk:
                    vectors[result.index] = _vector(result, self.endpoint_now())
            return vectors
        return self._embed(texts)

    def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        batches = self._batches(texts)
        manager, endpoint = self.sync_manager(), self.endpoint_now()
        failed = threading.Event()  # the other threads ask for nothing more

        def embed(batch: Sequence[str]) -> list[list[float]]:
            if failed.is_set():
                return []
            try:
                return _vectors(manager.embed(endpoint, self._call(batch)), batch, endpoint)
            except BaseException as error:
                failed.set()
                if isinstance(error, SpanwireError):
                    as_model_error(error)
                raise

        if len(batches) <= 1 or self.max_concurrency == 1:
            return [vector for batch in batches for vector in embed(batch)]
        with ThreadPoolExecutor(min(self.max_concurrency, len(batches)), "spanwire embeddings") as pool:
            # Each with the caller's context, so that spans nest.
            futures = [pool.submit(contextvars.copy_context().run, embed, batch) for batch in batches]
            try:  # the one that failed raises here, whatever the others gave
                return [vector for future in futures for vector in future.result()]
            except BaseException:
                failed.set()
                raise

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return self._embed([text])[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text. Raises what ``spanwire.ConnectionManager.embed`` does."""
        if self._by_jobs(texts):
            vectors: list[list[float]] = [[] for _ in texts]
            async with self.async_manager().submit_many(
                self.endpoint_now(), _Calls(self, texts), **self._how()
            ) as bulk:
                async for result in bulk:
                    vectors[result.index] = _vector(result, self.endpoint_now())
            return vectors
        return await self._aembed(texts)

    async def _aembed(self, texts: Sequence[str]) -> list[list[float]]:
        batches = self._batches(texts)
        manager, endpoint = self.async_manager(), self.endpoint_now()
        found: list[list[list[float]]] = [[] for _ in batches]
        todo = deque(enumerate(batches))

        async def work() -> None:
            while todo:
                position, batch = todo.popleft()
                try:
                    found[position] = _vectors(await manager.embed(endpoint, self._call(batch)), batch, endpoint)
                except SpanwireError as error:
                    todo.clear()
                    as_model_error(error)
                    raise

        if len(batches) <= 1:
            await work()
        else:
            workers = [asyncio.ensure_future(work()) for _ in range(min(self.max_concurrency, len(batches)))]
            try:
                await asyncio.gather(*workers)
            except BaseException:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                raise
        return [vector for vectors in found for vector in vectors]

    async def aembed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return (await self._aembed([text]))[0]

    def _by_jobs(self, texts: Sequence[str]) -> bool:
        """Whether these are a bulk of jobs, cut as the provider takes them."""
        several = not isinstance(texts, str) and len(texts) > (0 if self.group else 1)
        return several and self.async_manager().answers_later(self.endpoint_now())

    def _how(self) -> dict[str, Any]:
        chosen = self.model_fields_set
        return {
            "group": self.group,
            "retry_failed": bool(self.group),  # who calls again wants it tried again
            "deadline_s": self.endpoint_now().timeouts.total_s,
            "shard": self.chunk_size if "chunk_size" in chosen else None,
            "shard_bytes": self.chunk_bytes if "chunk_bytes" in chosen else None,
        }

    def _batches(self, texts: Sequence[str]) -> list[list[str]]:
        if isinstance(texts, str):
            raise ConfigurationError("embed_documents() takes a list of texts; embed_query() takes one text")
        return list(batches_of(texts, self.chunk_size, self.chunk_bytes))

    def _call(self, batch: Sequence[str]) -> spanwire.Call:
        body: dict[str, Any] = {"dimensions": self.dimensions, "encoding_format": self.encoding_format}
        body.update(self.model_kwargs)
        body.update(self.extra_body or {})
        return spanwire.Call.embeddings(self.model, list(batch), **body)


class _Calls:
    """A call for each text, made when it is asked for."""

    def __init__(self, model: SpanwireEmbeddings, texts: Sequence[str]) -> None:
        self._model = model
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[spanwire.Call]:
        return (self._model._call([text]) for text in self._texts)


def batches_of(texts: Sequence[str], most: int, most_bytes: int) -> Iterator[list[str]]:
    """Cut into lists of at most ``most`` texts and ``most_bytes`` bytes of UTF-8; a longer text is a list of its own."""
    batch: list[str] = []
    size = 0
    for text in texts:
        length = len(text.encode("utf-8", "surrogatepass"))
        if batch and (len(batch) == most or size + length > most_bytes):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += length
    if batch:
        yield batch


def _vector(result: Any, endpoint: spanwire.Endpoint) -> list[float]:
    """Of one result of a bulk."""
    try:
        found = result.result()
        if not isinstance(found, spanwire.Embeddings):
            raise ProtocolError("the answer has no embeddings", endpoint=endpoint.address)
    except SpanwireError as error:
        as_model_error(error)
        raise
    return _vectors(found, [""], endpoint)[0]


def _vectors(answer: spanwire.Embeddings, batch: Sequence[str], endpoint: spanwire.Endpoint) -> list[list[float]]:
    if len(answer.vectors) != len(batch):
        raise ProtocolError(
            f"the server gave {len(answer.vectors)} vectors for {len(batch)} texts", endpoint=endpoint.address
        )
    return answer.vectors
