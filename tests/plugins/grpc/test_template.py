from __future__ import annotations

import sys
from typing import Any

import pytest
from spanwire_grpc.template import prompt_of

import spanwire
from spanwire.errors import ConfigurationError

CHATML = (
    "{% for message in messages %}\n"
    "    {% if loop.first and message['role'] != 'system' %}\n"
    "<|im_start|>system\nBe kind.<|im_end|>\n"
    "    {% endif %}\n"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rendered(template: str | None, *messages: dict[str, Any], model: str | None = None, **more: Any) -> tuple[str, str]:
    options = more if template is None else {"chat_template": template, **more}
    endpoint = spanwire.Endpoint("grpc://h:1", options=options)
    call = spanwire.Call.chat("m", [*(messages or [{"role": "user", "content": "Hi"}])])
    return prompt_of(call, endpoint, model)


def test_as_hugging_face_renders_it() -> None:
    prompt, says = rendered(CHATML)
    assert prompt == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert says == "rendered; template=given"


def test_the_models_own_is_taken_where_none_is_given() -> None:
    assert rendered(None, model="{{ messages[0].content }}!") == ("Hi!", "rendered; template=model")
    assert rendered("{{ bos_token }}", chat_template_kwargs={"bos_token": "<s>"})[0] == "<s>"


def test_plain_is_the_texts_as_they_are() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert rendered("plain", {"role": "system", "content": "x"}, parts) == ("x\nab", "rendered; template=plain")


def test_without_a_template_it_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="chat_template"):
        rendered(None)


@pytest.mark.parametrize("field", ["tools", "response_format"])
def test_what_text_cannot_carry_is_refused(field: str) -> None:
    call = spanwire.Call.chat("m", [{"role": "user", "content": "Hi"}], **{field: [{"x": 1}]})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=field):
        prompt_of(call, spanwire.Endpoint("grpc://h:1", options={"chat_template": "plain"}), None)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception(messages[0].content) }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}{{ lipsum.__globals__['os'].system('true') }}",
        "{% for n in range(10**9) %}x{% endfor %}",
        "{% for n in range(99999) %}{% for m in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro again(n) %}{{ again(n) }}{{ again(n) }}{% endmacro %}{{ again(1) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ ((9 ** 64) ** 64) ** 64 }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 12 * ['x'] }}",
        "{# " + "x" * 300_000 + " #}",
        "{% if %}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_can_neither_change_nor_reach_anything_nor_show_a_prompt(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spanwire_grpc.template._RENDER_S", 0.05)
    secret = "a prompt that is nobody's business"
    with pytest.raises(ConfigurationError) as caught:
        prompt, _ = rendered(template, {"role": "user", "content": secret})
        assert prompt == ""  # what the sandbox hides is undefined, and that is nothing
        raise ConfigurationError("nothing came of it")
    assert secret not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "template",
    [
        "{% for n in [1] %}{% endfor %}",
        "{{ messages | length }}",
        "{{ messages[0].content.strip() }}",
        "{{ messages[0].content + 'x' }}",
        "{{ messages[0].content ~ 'x' }}",
        "{{ 1 if messages is iterable }}",
    ],
)
def test_a_template_that_goes_on_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendered(template)
    monkeypatch.setattr("spanwire_grpc.template._RENDER_S", -1.0)
    with pytest.raises(ConfigurationError, match="cannot be rendered: TimeoutError"):
        rendered(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ 'a'.ljust(width=10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%(a)1000000000d' % {'a': 1} }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w='1000000000') }}",
        "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
        "{{ ('a' * 16000000) | replace('a', 'b' * 1000) }}",
        "{{ ('a' * 16000000).replace('a', 'b' * 1000) }}",
        "{{ ('a' * 16000000).join(['b'] * 1000) }}",
        "{{ (['b'] * 1000) | join('a' * 16000000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('\n' * 1000000) | indent(100000) }}",
        "{{ range(100000) | map('center', 10000) | join }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 1 | round(1000000000, 'ceil') }}",
        "{{ (1).to_bytes(10 ** 9, 'big') }}",
        "{{ range(100000) | batch(1000000000, 'x') | list }}",
        "{{ lipsum(n=10000) }}",
        "{{ strftime_now('%c' * 1000000) }}",
        "{% set a = (2 ** 64) ** 60 %}" + "{% set a = a * a %}" * 16 + "{{ 1 if a else 0 }}",
        "{% set a = 'a' * 1000000 %}" + "{% set a = a + a %}" * 16 + "{{ a | length }}",
        "{% set a = 'a' * 1000000 %}" + "{% set a = a ~ a %}" * 16 + "{{ a | length }}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    ],
)
def test_a_template_makes_nothing_huge(template: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be rendered: (Security|Undefined|Template)"):
        rendered(template)


def test_what_is_no_more_than_it_should_be() -> None:
    assert rendered("{{ 3 * 'ab' }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ '%s-%d' % ('a', 2) }} {{ '{:.1f}'.format(1) }}")[0] == (
        "ababab 3 8 a-2 1.0"
    )
    assert rendered("{{ 'a' ~ 1 ~ none }} {{ [1] + [2] }} {{ ' a\n b'|indent(2) }}|{{ [{'x': 1}] | join('', 'x') }}")[
        0
    ] == ("a1None [1, 2]  a\n   b|1")
    assert (
        rendered(
            "{{ 'aXa' | replace('a', 'b') }} {{ 'aXa'.replace('a', 'b', 1) }} {{ [1, 2] | map('string') | join(',') }}"
        )[0]
        == "bXb bXa 1,2"
    )


def test_a_picture_is_no_text() -> None:
    with pytest.raises(ConfigurationError, match="something else"):
        rendered("plain", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


def test_without_jinja_it_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'spanwire\[grpc\]'"):
        rendered("{{ 1 }}")


def test_functions_that_templates_expect() -> None:
    prompt, _ = rendered("{{ strftime_now('%Y') }} {{ messages | tojson }}{% for n in [1, 2] %}{% break %}{% endfor %}")
    assert prompt[:4].isdigit()
    assert prompt.endswith('[{"role": "user", "content": "Hi"}]')
