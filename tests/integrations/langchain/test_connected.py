from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any, cast

import pytest
from langchain_spanwire import ChatSpanwire, SpanwireEmbeddings
from pydantic import SecretStr, ValidationError

import spanwire
from spanwire.errors import ConfigurationError
from tests.integrations.langchain.asking import WAYS, ask
from tests.support import run, serving

URL = "http://127.0.0.1:1/v1"


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPANWIRE_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def chat(endpoint: Any = URL, **more: Any) -> ChatSpanwire:
    return ChatSpanwire(model="m", endpoint=endpoint, **more)


def test_fields_become_an_endpoint() -> None:
    endpoint = chat(
        api_key="k",
        transport="sse",
        dialect="openai",
        timeout=spanwire.Timeouts(total_s=9),
        max_retries=4,
        default_headers={"x-a": "1"},
        default_query={"v": "2"},
    ).endpoint_now()
    assert (endpoint.api_key, endpoint.transport, endpoint.dialect) == ("k", "sse", "openai")
    assert endpoint.timeouts.total_s == 9
    assert endpoint.retries.max_attempts == 5
    assert (endpoint.headers, endpoint.query) == ({"x-a": "1"}, {"v": "2"})


def test_an_endpoint_keeps_what_the_fields_do_not_say() -> None:
    given = spanwire.Endpoint(
        URL,
        api_key="k",
        headers={"x-a": "1", "x-b": "1"},
        retries=spanwire.Retries(base_s=3),
        limits=spanwire.Limits(max_concurrent=2),
        tls=spanwire.TLS(verify=False),
    )
    assert chat(given).endpoint_now() is given
    made = chat(given, default_headers={"x-b": "2"}, max_retries=0).endpoint_now()
    assert made.headers == {"x-a": "1", "x-b": "2"}
    assert (made.retries.base_s, made.retries.max_attempts) == (3, 1)
    assert (made.limits, made.tls, made.api_key) == (given.limits, given.tls, "k")


def test_base_url_is_another_name() -> None:
    assert ChatSpanwire(model="m", base_url=URL).endpoint_now().url == URL  # type: ignore[call-arg]
    assert SpanwireEmbeddings(model="m", base_url=URL).endpoint_now().url == URL  # type: ignore[call-arg]


def test_a_number_of_seconds_limits_each_silence() -> None:
    assert chat(timeout=60).endpoint_now().timeouts == spanwire.Timeouts(connect_s=10, first_content_s=60, idle_s=60)
    assert chat(timeout=0.5).endpoint_now().timeouts == spanwire.Timeouts(
        connect_s=0.5, first_content_s=0.5, idle_s=0.5
    )
    assert chat(timeout=None).endpoint_now().timeouts == spanwire.Timeouts()


def test_the_endpoint_follows_its_fields() -> None:
    model = chat()
    one = model.endpoint_now()
    assert model.endpoint_now() is one
    model.max_retries = 7
    assert model.endpoint_now().retries.max_attempts == 8
    assert model.model_copy(update={"default_headers": {"a": "b"}}).endpoint_now().headers == {"a": "b"}
    assert model.endpoint_now().headers == {}


@pytest.mark.parametrize(
    "given",
    [
        {"endpoint": "127.0.0.1:8000"},
        {"endpoint": None},
        {"api_key": "line\nbreak"},
        {"default_headers": {"a b": "c"}},
        {"timeout": "60"},
        {"timeout": -1},
        {"timeout": (1, 2)},
        {"max_retries": -1},
        {"manager": object()},
        {"temperature": "hot"},
    ],
)
def test_bad_values_are_told_at_once(given: dict[str, Any]) -> None:
    with pytest.raises((ConfigurationError, ValidationError)):
        chat(**given)


def test_no_address() -> None:
    with pytest.raises(ConfigurationError, match="endpoint="):
        ChatSpanwire(model="m")  # type: ignore[call-arg]


# --- keys ---------------------------------------------------------------------------------------------------------------


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert chat().endpoint_now().api_key is None  # any other server would learn a secret that is not meant for it
    assert chat("https://api.openai.com.evil.example/v1").endpoint_now().api_key is None
    assert chat("https://api.openai.com/v1").endpoint_now().api_key == "theirs"
    monkeypatch.setenv("SPANWIRE_API_KEY", "ours")
    assert chat().endpoint_now().api_key == "ours"
    assert chat("https://api.openai.com/v1").endpoint_now().api_key == "ours"
    assert chat(api_key="given").endpoint_now().api_key == "given"
    assert chat(spanwire.Endpoint(URL, api_key="its own")).endpoint_now().api_key == "its own"


@pytest.mark.parametrize("way", WAYS)
def test_keys_from_functions(way: str) -> None:
    async def later() -> str:
        return "from-async"

    with serving() as server:
        for key in ("text", SecretStr("secret"), lambda: "from-function", later):
            assert ask(way, chat(server.url, api_key=key)).error is None
        sent = [request.headers["authorization"] for request in server.requests]
    assert sent == ["Bearer text", "Bearer secret", "Bearer from-function", "Bearer from-async"]


def test_secrets_are_not_shown() -> None:
    model = chat(
        f"{URL}?key=hidden-1",
        api_key="hidden-2",
        default_headers={"x": "hidden-3"},
        default_query={"y": "hidden-4"},
    )
    shown = [
        repr(model),
        str(model),
        str(model._identifying_params),
        str(model._get_invocation_params()),
        str(model._serialized),
    ]
    shown.append(repr(SpanwireEmbeddings(model="e", endpoint=f"{URL}?key=hidden-1", api_key=SecretStr("hidden-2"))))
    assert not [text for text in shown if "hidden" in text]


# --- managers, copies, other processes -------------------------------------------------------------------------------------


def test_a_manager_serves_both_kinds_of_callers() -> None:
    manager = spanwire.ConnectionManager()
    sync = spanwire.SyncConnectionManager(manager)
    for given in (manager, sync):
        model = chat(manager=given)
        assert model.async_manager() is manager
        assert model.sync_manager().manager is manager
        assert model.sync_manager() is model.sync_manager()
    assert chat().async_manager() is spanwire.default_manager()
    assert chat().sync_manager() is spanwire.default_sync_manager()


def test_pickling() -> None:
    model = chat(api_key="k", temperature=0.5, timeout=3)
    model.endpoint_now()
    again = cast(ChatSpanwire, pickle.loads(pickle.dumps(model)))
    assert again.endpoint_now() == model.endpoint_now()
    assert (again.temperature, again.model_name) == (0.5, "m")
    embeddings = pickle.loads(pickle.dumps(SpanwireEmbeddings(model="e", endpoint=URL)))
    assert embeddings.endpoint_now().url == URL


def test_pickling_after_use() -> None:
    with serving() as server:
        model = chat(server.url)
        model.invoke("q")
        assert pickle.loads(pickle.dumps(model)).invoke("q").content == "You said: q"


def test_a_model_with_its_own_manager_says_that_it_cannot_be_pickled() -> None:
    with pytest.raises(ConfigurationError, match="leave manager out"):
        pickle.dumps(chat(manager=spanwire.ConnectionManager()))


@pytest.mark.parametrize(
    "model",
    [
        lambda key: chat(api_key=key),
        lambda key: ChatSpanwire(model="m", endpoint=spanwire.Endpoint(URL, api_key=key)),
        lambda key: SpanwireEmbeddings(model="e", endpoint=URL, api_key=key),
    ],
)
def test_a_key_s_function_that_cannot_be_pickled_is_named(model: Any) -> None:
    made = model(lambda: "k")
    with pytest.raises(ConfigurationError, match="api_key cannot be pickled, it is a function"):
        pickle.dumps(made)
    assert copy.deepcopy(made).endpoint_now().api_key is made.endpoint_now().api_key


def test_copies_share_the_manager() -> None:
    manager = spanwire.ConnectionManager()
    model = chat(manager=manager)
    model.sync_manager()
    for made in (copy.copy(model), copy.deepcopy(model), model.model_copy(), model.model_copy(deep=True)):
        assert made.manager is manager
        assert made.model_name == "m"


def test_one_model_on_one_loop_after_another() -> None:
    with serving() as server:
        model = chat(server.url)
        for _ in range(3):
            assert asyncio.run(model.ainvoke("q")).content == "You said: q"
        assert server.open_connections <= 3
        server.wait_for(lambda s: s.open_connections == 0)  # each loop has closed what was its own


@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_models_share_one_connection(way: str) -> None:
    with serving() as server:
        if way.startswith("a"):

            async def body() -> None:
                for _ in range(100):
                    model = chat(server.url, api_key=f"key-{_}")
                    if way == "ainvoke":
                        await model.ainvoke("q")
                    else:
                        async for _chunk in model.astream("q"):
                            pass

            run(body)
        else:
            for number in range(100):
                ask(way, chat(server.url, default_headers={"x-number": str(number)}))
        assert (server.connections, len(server.requests)) == (1, 100)
