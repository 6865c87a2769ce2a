"""Which calls go into which job."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spanwire
from spanwire.calls import BatchReply, Embeddings, Reply
from spanwire.errors import ConfigurationError, ProtocolError, RateLimited, ServerError, server_error
from spanwire.jobs.bulk.manifest import encoded
from spanwire.jobs.bulk.shards import Cutter, Rules, Shard, call_of, halves, may_be_one_call, outcomes, rules_of
from spanwire.jobs.contract import BatchLimits
from tests.core.jobs.simple import Simple

E = spanwire.Call.embeddings


def cut(rules: Rules, *calls: spanwire.Call) -> list[Shard]:
    cutter = Cutter(rules)
    return [shard for call in calls for shard in cutter.add(call, len(encoded(call)))] + cutter.finish()


def numbers(shards: list[Shard]) -> list[list[int]]:
    return [[part.index for part in shard.parts] for shard in shards]


class Batches(Simple):
    batches = BatchLimits(frozenset({"chat", "embeddings"}), most_calls=3, most_bytes=10_000, most_inputs=4)

    def fetches(self, *_: Any) -> Any: ...
    def fetched(self, *_: Any) -> Any: ...
    def replies(self, *_: Any) -> Any: ...


def rules(codec: Any = None, **more: Any) -> Rules:
    named = {"merge": True, "batch": None, "shard": None, "shard_bytes": None, "address": "h"}
    return rules_of(codec or Simple(), **{**named, **more})


CALLS = st.lists(
    st.one_of(
        st.builds(E, st.sampled_from(["e", "f"]), st.text("ab", min_size=1, max_size=30)),
        st.builds(E, st.just("e"), st.lists(st.text("ab", max_size=9), min_size=1, max_size=5)),
        st.builds(E, st.just("e"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        st.builds(E, st.just("e"), st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=1, max_size=3)),
        st.builds(E, st.just("e"), st.text("ab", min_size=1, max_size=3), dimensions=st.integers(1, 2)),
        st.builds(E, st.just("e"), st.just("a"), headers=st.just({"x-a": "b"})),
        st.builds(spanwire.Call.chat, st.just("m"), st.just([{"role": "user", "content": "hi"}])),
    ),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(CALLS, st.integers(1, 6), st.integers(50, 400), st.booleans())
def test_every_call_is_in_one_shard_in_its_place(
    calls: list[spanwire.Call], inputs: int, most_bytes: int, batch: bool
) -> None:
    made = rules(Batches() if batch else None, shard=inputs, shard_bytes=most_bytes)
    shards = cut(made, *calls)
    assert [number for shard in numbers(shards) for number in shard] == list(range(len(calls)))
    assert [shard.path for shard in shards] == [str(number) for number in range(len(shards))]
    for shard in shards:
        assert [part.call for part in shard.parts] == [calls[part.index] for part in shard.parts]
        several = len(shard.parts) > 1
        count = sum(part.inputs for part in shard.parts)
        submitted = call_of(shard)
        if several:
            assert len({calls[part.index].model for part in shard.parts}) == 1
            assert not any(calls[part.index].headers for part in shard.parts)
            assert shard.size <= most_bytes
            assert (count <= 4 and len(shard.parts) <= min(inputs, 3)) if shard.kind == "batch" else count <= inputs
        if shard.kind == "merge" and several:
            assert len(submitted.body["input"]) == count
            assert len(encoded(submitted)) <= shard.size
        if shard.kind == "batch":
            assert submitted.operation == "batch"
            assert [row["custom_id"] for row in submitted.body["requests"]] == [str(p.index) for p in shard.parts]
        elif not several:
            assert submitted is shard.parts[0].call


def test_calls_that_cannot_be_together_are_not() -> None:
    texts = [E("e", "a"), E("e", ["b", "c"])]
    assert numbers(cut(rules(), *texts)) == [[0, 1]]
    assert call_of(cut(rules(), *texts)[0]).body == {"input": ["a", "b", "c"]}
    tokens = [E("e", [1, 2]), E("e", [[3], [4]])]
    assert call_of(cut(rules(), *tokens)[0]).body == {"input": [[1, 2], [3], [4]]}
    for other in (E("f", "b"), E("e", [1]), E("e", "b", dimensions=2), E("e", "b", headers={"a": "b"})):
        assert numbers(cut(rules(), texts[0], other)) == [[0], [1]]
    chat = spanwire.Call.chat("m", [])
    assert numbers(cut(rules(), chat, chat)) == [[0], [1]]
    assert numbers(cut(rules(merge=False), *texts)) == [[0], [1]]
    assert numbers(cut(rules(merge=False, shard=5), *texts)) == [[0, 1]]


def test_the_rules_keep_the_limits_of_the_provider() -> None:
    assert rules().inputs == 100
    assert rules(Simple(most_body_bytes=10_000)).bytes < 10_000
    assert rules(Simple(most_body_bytes=10_000), shard_bytes=20_000).bytes < 10_000
    assert rules(Simple(), shard_bytes=7).bytes == 7
    made = rules(Batches())
    assert (made.batch, made.batch_calls, made.batch_inputs, made.batch_bytes) == (("chat", "embeddings"), 3, 4, 10_000)
    assert rules(Batches(), shard=2).batch_calls == 2
    assert rules(Batches(), batch=False).batch == ()
    with pytest.raises(ConfigurationError, match="no batches"):
        rules(batch=True)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40))
def test_halves_are_all_of_it(count: int) -> None:
    (shard,) = cut(rules(), *[E("e", str(number)) for number in range(count)])
    leaves, todo = [], [shard]
    while todo:
        one = todo.pop(0)
        if len(one.parts) == 1:
            leaves.append(one)
        else:
            todo = [*halves(one), *todo]
    assert [leaf.parts[0].index for leaf in leaves] == list(range(count))
    assert len({leaf.path for leaf in leaves}) == count


def test_results_are_matched_by_place_and_number() -> None:
    (shard,) = cut(rules(), E("e", "a"), E("e", ["b", "c"]))
    usage = spanwire.Usage(input_tokens=3)
    found = outcomes(shard, Embeddings([[1.0], [2.0], [3.0]], usage=usage))
    assert [one.vectors for one in found if isinstance(one, Embeddings)] == [[[1.0]], [[2.0], [3.0]]]
    assert [one.usage for one in found if isinstance(one, Embeddings)] == [None, None]
    for wrong in (Embeddings([[1.0]]), Embeddings([[1.0]] * 4), Reply(text="[1]")):
        first, second = outcomes(shard, wrong)
        assert isinstance(first, ProtocolError)
        assert "shard 0" in first.message
        assert first is not second  # a traceback of its own
    (alone,) = cut(rules(), E("e", "a"))
    assert outcomes(alone, Embeddings([[1.0]], usage=usage))[0].usage == usage  # type: ignore[union-attr]
    assert isinstance(outcomes(alone, Embeddings([]))[0], ProtocolError)
    text = Reply(text="what it likes")
    assert outcomes(alone, text) == [text]


def test_results_of_a_batch_are_matched_by_name() -> None:
    (shard,) = cut(rules(Batches()), E("e", "a"), E("e", "b"), E("e", "c"))
    bad = ServerError("no")
    reply = BatchReply({"0": Embeddings([[1.0]]), "1": bad, "9": Embeddings([[2.0]])})
    first, second, third = outcomes(shard, reply)
    assert isinstance(first, Embeddings)
    assert second is bad
    assert isinstance(third, ProtocolError)
    assert "no answer to call 2" in third.message
    wrong = outcomes(shard, BatchReply({"0": Embeddings([])}))[0]
    assert isinstance(wrong, ProtocolError)
    assert all(isinstance(one, ProtocolError) for one in outcomes(shard, Reply()))


def test_what_may_be_one_calls_fault() -> None:
    assert may_be_one_call(ServerError("the model failed"))
    assert not may_be_one_call(RateLimited("later"))
    assert not may_be_one_call(server_error("Not Found", status=404))
    assert not may_be_one_call(server_error("Not Found", code="404"))  # as the store gives it back
    assert may_be_one_call(server_error("no such model", status=404, code="model_not_found"))
