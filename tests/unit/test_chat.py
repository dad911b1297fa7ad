"""Messages to token ids: one BOS, and no message can write the template's control tokens."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_mesh.errors import RequestError
from skippy_mesh.gateway.chat import ChatTemplate, encode_prompt
from stages.fake import BOS, IM_END, IM_START, FakeTokenizer


def render(template: str, *contents: str, **variables: object) -> str:
    tokenizer = FakeTokenizer(chat_template=template, adds_bos=False)
    messages = [{"role": "user", "content": content} for content in contents]
    return text_of(ChatTemplate(tokenizer).encode(messages, variables=variables))


def text_of(ids: list[int]) -> str:
    return b"".join(FakeTokenizer().piece(token, special=True) for token in ids).decode()


def test_a_conversation_becomes_the_tokens_its_template_says() -> None:
    ids = ChatTemplate(FakeTokenizer()).encode([{"role": "user", "content": "hi"}])
    assert ids == [
        BOS, IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"
    ]  # fmt: skip


def test_the_generation_prompt_can_be_left_out() -> None:
    template = ChatTemplate(FakeTokenizer())
    ids = template.encode([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert ids[-2:] == [IM_END, ord("\n")]


@pytest.mark.parametrize("writes_bos", [False, True])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_there_is_one_bos_whoever_asks_for_it(writes_bos: bool, adds_bos: bool) -> None:
    template = ("{{ bos_token }}" if writes_bos else "") + "{{ messages[0].content }}"
    tokenizer = FakeTokenizer(chat_template=template, adds_bos=adds_bos)
    bos = [BOS] if writes_bos or adds_bos else []
    assert ChatTemplate(tokenizer).encode([{"role": "user", "content": "x"}]) == [*bos, ord("x")]


def test_a_raw_prompt_keeps_its_control_tokens_and_one_bos() -> None:
    for text in ("<|im_start|>x", "<s><|im_start|>x"):
        assert encode_prompt(FakeTokenizer(), text) == [BOS, IM_START, ord("x")]
    assert encode_prompt(FakeTokenizer(), "x", add_special=False) == [ord("x")]


specials = st.sampled_from([*FakeTokenizer.special_texts, "<|im_", "end|>", "\ue000", "0", "a"])


@given(st.lists(specials, max_size=8).map("".join), st.lists(specials, max_size=8).map("".join))
def test_messages_cannot_forge_control_tokens(first: str, second: str) -> None:
    template = ChatTemplate(FakeTokenizer())
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    ids = template.encode(messages, add_special=False)
    honest = template.encode([{**message, "content": ""} for message in messages])
    assert [token for token in ids if token > 255] == [token for token in honest[1:] if token > 255]
    assert text_of(ids) == (
        f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n{second}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_variables_cannot_forge_control_tokens() -> None:
    tokenizer = FakeTokenizer(chat_template="{{ style.tone }}", adds_bos=False)
    ids = ChatTemplate(tokenizer).encode([], variables={"style": {"tone": "<|im_end|>"}})
    assert ids == list(b"<|im_end|>")


def test_client_variables_do_not_replace_the_messages() -> None:
    assert render("{{ messages[0].content }}", "real", messages=[{"content": "false"}]) == "real"


def test_templates_render_as_hugging_face_renders_them() -> None:
    assert render("{%- for m in messages %}\n{{ m.content }}\n{% endfor %}", "a", "b") == "a\nb\n"
    assert render("{{ messages[0].content | tojson }}", "<é&'\">") == '"<é&\'\\">"'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}") == (
        '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'
    )
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "a", "b") == "a"
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{{ 'yes' if tools is none else 'no' }}") == "yes"


def test_the_clock_of_a_template_is_given() -> None:
    tokenizer = FakeTokenizer(chat_template="{{ strftime_now('%d %b %Y') }}", adds_bos=False)
    template = ChatTemplate(tokenizer, now=lambda: datetime(2031, 2, 3))
    assert text_of(template.encode([])) == "03 Feb 2031"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% if %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        (None, "/v1/completions"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(template: str | None, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        ChatTemplate(FakeTokenizer(chat_template=template)).encode([{"content": "x"}])
    assert caught.value.code == "template_error"
