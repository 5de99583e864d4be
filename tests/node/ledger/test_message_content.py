"""The content of messages: text, in one piece or in parts."""

from typing import Any

import pytest

from node.ledger.message_content import NotText, with_plain_content


def part(text: object) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "plain"),
    [("hi", "hi"), (None, None), ([], ""), ([part("h")], "h"), ([part("h"), part(""), part("i")], "hi"), (7, 7)],
)
def test_parts_are_joined_and_all_else_stays(content: object, plain: object) -> None:
    message = {"role": "user", "content": content, "name": "n"}
    assert with_plain_content([message]) == [{"role": "user", "content": plain, "name": "n"}]
    assert message["content"] is content, "the caller's message is not changed"


def test_a_message_without_content_has_none() -> None:
    assert with_plain_content([{"role": "assistant"}]) == [{"role": "assistant", "content": None}]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"),
        ({"type": "input_audio"}, "'input_audio'"),
        ({"type": "x" * 1000}, "'" + "x" * 32 + "'"),
        (part(7), "no part of a message"),
        ({"type": 7, "text": "a"}, "no part of a message"),
        ({"text": "a"}, "no part of a message"),
        ("a", "no part of a message"),
    ],
)
def test_what_is_not_text_is_named(bad: object, named: str) -> None:
    with pytest.raises(NotText) as caught:
        with_plain_content([{"content": "x"}, {"content": [part("a"), bad]}])
    assert caught.value.where == "messages[1].content[1]"
    assert str(caught.value).startswith(f"messages[1].content[1] is {named}: only parts of the type text can be sent")
