"""What a store has of a bulk, in the order of its calls. Blocking; submits nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from ...calls import BatchReply, Call, Embeddings, Reply
from ...errors import ConfigurationError, SpanwireError
from ..contract import OPEN, BatchCodec, JobCodec, JobRow, Store
from ..runner import failure_of
from ..timing import timeline_of
from .manifest import Manifest, encoded, job_id
from .shards import Cutter, Outcome, Part, Rules, Shard, halves, may_be_one_call, outcomes

__all__ = ["Found", "stored"]

#: A call's place, the id of its job, and what became of it: None while it is not known.
Found = tuple[int, str | None, Outcome | None]


def stored(
    store: Store,
    codec: JobCodec,
    calls: Iterable[Call],
    *,
    group: str,
    origin: str,
    dialect: str,
    rules: Rules,
    submitted: bytes = b"",
) -> Iterator[Found]:
    """Every call once, in order. ``calls`` is read twice.

    Args:
        submitted: the manifest's digest when they were submitted by this bulk; empty if they were not.

    Raises:
        ConfigurationError: the calls are not those any more.
        JobError: the store is down.
    """
    manifest, again = (Manifest(group=group, origin=origin, dialect=dialect, rules=rules) for _ in range(2))
    for call in calls:
        manifest.add(encoded(call))
    digest = manifest.digest()
    if submitted not in (b"", digest):
        raise ConfigurationError(
            "the calls are others than those that were submitted: did the file change? Their results are in the store, and are "
            "found with the calls as they were"
        )
    look = _Look(store, codec, digest)
    cutter = Cutter(rules)
    for call in calls:
        data = encoded(call)
        again.add(data)
        for shard in cutter.add(call, data):
            yield from sorted(look.at(shard), key=lambda found: found[0])
    if again.digest() != digest:
        raise ConfigurationError("the calls were others when they were read again: did the file change?")
    for shard in cutter.finish():
        yield from sorted(look.at(shard), key=lambda found: found[0])


class _Look:
    def __init__(self, store: Store, codec: JobCodec, manifest: bytes) -> None:
        self._store = store
        self._codec = codec
        self._manifest = manifest

    def at(self, shard: Shard) -> Iterator[Found]:
        """A shard's calls, by its last round, or by its halves."""
        job = job_id(self._manifest, shard.path, shard.round)
        row = self._store.get(job)
        if row is None or row.state in OPEN:
            yield from ((part.index, None if row is None else job, None) for part in shard.parts)
            return
        later = Shard(shard.path, shard.kind, shard.parts, round=shard.round + 1)
        if row.state != "succeeded":
            why = failure_of(self._codec, row)
            if row.state == "failed" and len(shard.parts) > 1 and may_be_one_call(why):
                for half in halves(shard):
                    yield from self.at(half)
            elif self._is_there(later):
                yield from self.at(later)
            else:
                yield from ((part.index, job, why) for part in shard.parts)
            return
        found = self._read(shard, row)
        failed = [part for part, one in zip(shard.parts, found, strict=True) if isinstance(one, SpanwireError)]
        if failed and shard.kind == "batch" and self._is_there(later):
            yield from self._both(shard, found, failed, job)
            return
        yield from ((part.index, job, one) for part, one in zip(shard.parts, found, strict=True))

    def _both(self, shard: Shard, found: list[Outcome], failed: list[Part], job: str) -> Iterator[Found]:
        for part, one in zip(shard.parts, found, strict=True):
            if not isinstance(one, SpanwireError):
                yield part.index, job, one
        yield from self.at(Shard(shard.path, shard.kind, failed, round=shard.round + 1))

    def _is_there(self, shard: Shard) -> bool:
        return bool(self._store.states([job_id(self._manifest, shard.path, shard.round)]))

    def _read(self, shard: Shard, row: JobRow) -> list[Outcome]:
        reply: Reply | Embeddings | BatchReply
        try:
            body = self._store.body(row.result)
            if shard.kind == "batch" and isinstance(self._codec, BatchCodec):
                reply = self._codec.replies(body)
            else:
                reply = self._codec.reply(row.operation, body)
        except SpanwireError as error:
            return [error for _ in shard.parts]
        return outcomes(shard, msgspec.structs.replace(reply, timeline=timeline_of(row)))
