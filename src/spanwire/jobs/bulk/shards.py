"""PURE: which calls go into which job, and what a job's reply is for each of them.

Where the provider takes batches, many calls are one batch. Else the inputs of many embeddings calls are put into one call.
Else each call is a job. Only calls that follow one another share a job, so what is in which depends on nothing but their
order and the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Literal

import msgspec

from ...calls import BatchReply, Call, Embeddings, Reply
from ...errors import (
    AuthenticationFailed,
    ConfigurationError,
    Overloaded,
    ProtocolError,
    RateLimited,
    ServerError,
    SpanwireError,
)
from ..contract import BatchCodec, JobCodec, State
from .manifest import encoded

__all__ = [
    "Cutter",
    "Outcome",
    "Part",
    "Rules",
    "Shard",
    "call_of",
    "halves",
    "may_be_one_call",
    "outcomes",
    "rules_of",
]

#: Inputs of one merged call. About what 256 KiB hold at 2 KB each; most servers take more, text-embeddings-inference 32.
INPUTS = 100
#: Bytes of one merged call where the provider sets no limit. Source: Baseten's, the least of those that set one.
BYTES = 256 * 1024
#: Bytes of one batch: its calls are in memory while they are submitted. OpenAI takes 200 MB.
BATCH_BYTES = 32 * 1024 * 1024
#: What a submit has around the call: the callback's URL, ids, settings.
_AROUND = 4096
#: What is kept of a call that is read again if it is needed, in bytes.
_KEPT = 80
#: What a row of a batch's file has around the call: custom_id, method, url.
_ROW = 128

#: Statuses that say that there is nothing at this path, or nothing that takes calls.
_NOT_THERE = frozenset({"404", "405"})

Kind = Literal["batch", "merge", "single"]
Outcome = Reply | Embeddings | SpanwireError


class Rules(msgspec.Struct, frozen=True):
    """How to cut. Part of the manifest: with others the same calls are other jobs.

    Attributes:
        batch: operations that go into batches.
        batch_calls, batch_inputs, batch_bytes: of one batch; inputs are the texts of embeddings, None for any number.
        inputs, bytes: of one call that is made of several; ``inputs=1``: none is.
    """

    batch: tuple[str, ...] = ()
    batch_calls: int = 1
    batch_inputs: int | None = None
    batch_bytes: int = BATCH_BYTES
    inputs: int = INPUTS
    bytes: int = BYTES


def rules_of(
    codec: JobCodec, *, merge: bool, batch: bool | None, shard: int | None, shard_bytes: int | None, address: str
) -> Rules:
    """The rules for a provider.

    Args:
        merge: inputs may be merged without being asked for.
        batch: None: where the provider has batches. True: it has to. False: no batches.
        shard: most inputs of a merged call, and calls of a batch.
        shard_bytes: most bytes of either.

    Raises:
        ConfigurationError: batches were asked for, and there are none.
    """
    limits = codec.batches if isinstance(codec, BatchCodec) else None
    if batch and limits is None:
        raise ConfigurationError("batch=True: this dialect has no batches", endpoint=address)
    most = codec.most_body_bytes
    fits = BYTES if most is None else max(1, min(BYTES, most - _AROUND))
    rules = Rules(
        inputs=shard if shard is not None else INPUTS if merge else 1,
        bytes=fits
        if shard_bytes is None
        else shard_bytes
        if most is None
        else max(1, min(shard_bytes, most - _AROUND)),
    )
    if limits is None or batch is False:
        return rules
    return msgspec.structs.replace(
        rules,
        batch=tuple(sorted(limits.operations)),
        batch_calls=limits.most_calls if shard is None else min(shard, limits.most_calls),
        batch_inputs=limits.most_inputs,
        batch_bytes=min(limits.most_bytes, BATCH_BYTES if shard_bytes is None else shard_bytes),
    )


class Part(msgspec.Struct, frozen=True, eq=False):
    """One call of a shard. ``inputs``: of embeddings, else 1. ``size``: bytes. ``call``: None of one that is read again if it is
    needed."""

    index: int
    call: Call | None
    inputs: int
    size: int


class Shard(msgspec.Struct, eq=False):
    """The calls of one job, and how far it is.

    Attributes:
        path, round: see :func:`~spanwire.jobs.bulk.manifest.job_id`.
        state: as it was found in the store: ``missing``, or None while nobody has looked.
        counted: its calls are in the count of those that were submitted.
        tries: how often its submit was refused for now.
    """

    path: str
    kind: Kind
    parts: Sequence[Part]
    round: int = 0
    state: State | Literal["missing"] | None = None
    counted: bool = False
    tries: int = 0

    @property
    def size(self) -> int:
        """Bytes of its calls."""
        return sum(part.size for part in self.parts)


class Cutter:
    """Takes calls in order, and gives shards: every call is in one, in its place."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._key: object = None
        self._kind: Kind = "single"
        self._parts: list[Part] = []
        self._inputs = self._bytes = 0
        self.calls = 0
        self._shards = 0

    def add(self, call: Call, size: int) -> list[Shard]:
        """The next call, of so many bytes; returns the shards that are whole now."""
        kind, key, inputs = self._fits_with(call)
        if kind == "batch":
            size += _ROW
            most, most_bytes = self._rules.batch_inputs, self._rules.batch_bytes
            full = len(self._parts) >= self._rules.batch_calls
        else:
            most, most_bytes, full = self._rules.inputs, self._rules.bytes, False
        over = (most is not None and self._inputs + inputs > most) or self._bytes + size > most_bytes
        whole = []
        if self._parts and (key is None or key != self._key or full or over):
            whole.append(self._close())
        self._parts.append(Part(self.calls, call, inputs, size))
        self._kind, self._key = kind, key
        self._inputs += inputs
        self._bytes += size
        self.calls += 1
        if key is None:
            whole.append(self._close())
        return whole

    def finish(self) -> list[Shard]:
        """There are no more calls."""
        return [self._close()] if self._parts else []

    def _close(self) -> Shard:
        shard = Shard(str(self._shards), self._kind, self._parts)
        self._shards += 1
        self._parts, self._key, self._inputs, self._bytes = [], None, 0, 0
        return shard

    def _fits_with(self, call: Call) -> tuple[Kind, object, int]:
        """What it can be together with: calls of the same key; None: it stays alone."""
        found = _inputs_of(call) if call.operation == "embeddings" else None
        count = 1 if found is None else len(found[1])
        if call.operation in self._rules.batch and not call.headers:
            return "batch", ("batch", call.operation, call.model), count
        if found is None or call.headers or self._rules.inputs == 1:
            return ("single" if found is None else "merge"), None, count
        others = {name: value for name, value in call.body.items() if name != "input"}
        return "merge", ("merge", call.model, encoded(Call("", "", others)), found[0]), count


def _inputs_of(call: Call) -> tuple[str, list[Any]] | None:
    """The inputs of an embeddings call, and whether they are texts or tokens; None for what is neither."""
    given = call.body.get("input")
    if isinstance(given, str):
        return "texts", [given]
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)) or not given:
        return None
    if all(isinstance(one, str) for one in given):
        return "texts", list(given)
    if all(isinstance(one, int) for one in given):
        return "tokens", [given]
    if all(isinstance(one, Sequence) and not isinstance(one, (str, bytes)) for one in given):
        return "tokens", list(given)
    return None


def call_of(shard: Shard) -> Call:
    """What is submitted for a shard."""
    calls = {part.index: part.call for part in shard.parts if part.call is not None}
    assert len(calls) == len(shard.parts)
    if shard.kind == "batch":
        return Call.batch({str(index): call for index, call in calls.items()})
    first = next(iter(calls.values()))
    if len(calls) == 1:
        return first
    inputs: list[Any] = []
    for call in calls.values():
        found = _inputs_of(call)
        assert found is not None
        inputs += found[1]
    return Call("embeddings", first.model, {**first.body, "input": inputs})


def without_calls(shard: Shard) -> list[Part]:
    """Its parts, of which the calls are left out: where they can be read again, a large batch is not kept in memory."""
    return [Part(part.index, None, part.inputs, _KEPT) for part in shard.parts]


def halves(shard: Shard) -> list[Shard]:
    """Both halves of a shard of two calls or more."""
    middle = (len(shard.parts) + 1) // 2
    return [
        Shard(f"{shard.path}/{number}", shard.kind, parts, counted=shard.counted)
        for number, parts in enumerate((shard.parts[:middle], shard.parts[middle:]))
    ]


def may_be_one_call(error: SpanwireError) -> bool:
    """Whether a job may have failed for one of its calls: it was refused, it was too large, the model has failed.

    What is not at this address (404, 405) is there for none of them. The code goes before the status, since it is what the
    store keeps: whoever reads the job later has to come to the same answer.
    """
    if isinstance(error, ServerError) and str(error.status if error.code is None else error.code) in _NOT_THERE:
        return False
    return not isinstance(error, (AuthenticationFailed, Overloaded, RateLimited))


def outcomes(shard: Shard, reply: Reply | Embeddings | BatchReply) -> list[Outcome]:
    """What a job's reply is for each call of its shard, in their order."""
    if shard.kind == "batch":
        if not isinstance(reply, BatchReply):
            return _each(shard, ProtocolError(f"the reply to shard {shard.path} is not a batch's"))
        return [_item(shard, reply, part) for part in shard.parts]
    if isinstance(reply, BatchReply) or (shard.kind == "merge" and not isinstance(reply, Embeddings)):
        if len(shard.parts) == 1 and isinstance(reply, Reply):
            return [reply]  # of a model that gives something else than vectors
        return _each(shard, ProtocolError(f"the reply to shard {shard.path} has no vectors"))
    if not isinstance(reply, Embeddings) or shard.kind == "single":
        return [reply]
    wanted = sum(part.inputs for part in shard.parts)
    if len(reply.vectors) != wanted:
        first, last = shard.parts[0].index, shard.parts[-1].index
        return _each(
            shard,
            ProtocolError(
                f"shard {shard.path} (calls {first} to {last}) has {len(reply.vectors)} vectors for {wanted} inputs"
            ),
        )
    if len(shard.parts) == 1:
        return [reply]
    found: list[Outcome] = []
    start = 0
    for part in shard.parts:
        # Of the usage nobody knows which part is whose.
        found.append(msgspec.structs.replace(reply, vectors=reply.vectors[start : start + part.inputs], usage=None))
        start += part.inputs
    return found


def _item(shard: Shard, reply: BatchReply, part: Part) -> Outcome:
    items: Mapping[str, Outcome] = reply.items
    found = items.get(str(part.index))
    if found is None:
        return ProtocolError(f"the batch of shard {shard.path} has no answer to call {part.index}")
    if isinstance(found, SpanwireError):
        return found
    if isinstance(found, Embeddings) and len(found.vectors) != part.inputs:
        return ProtocolError(f"call {part.index} has {len(found.vectors)} vectors for {part.inputs} inputs")
    return found if found.timeline is not None else msgspec.structs.replace(found, timeline=reply.timeline)


def _each(shard: Shard, error: SpanwireError) -> list[Outcome]:
    return [error if number == 0 else copy(error) for number in range(len(shard.parts))]
