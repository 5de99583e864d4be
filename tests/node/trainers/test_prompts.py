"""What a trainer may give as a prompt, and the model's limits."""

import json
from pathlib import Path

import pytest

from codec.errors import UsageError
from node.ledger.model_limits import limits_of
from node.ledger.packing import pack_tokens
from node.trainers.prompts import BadPrompt, Tokens

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz:;"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a tokenizer of one token per letter, and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=":")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(LETTERS.index, text))


def test_text_and_chat_messages_become_the_same_tokens_as_at_the_gateway(base: Path):
    from node.gateway.text import Text

    tokens = Tokens(base)
    assert tokens.of("abc") == ids("abc")
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    assert tokens.of(messages) == ids("system:x;user:hi;assistant:")
    text = Text({name: (base / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")})
    rendered = text.render(messages, add_generation_prompt=True)
    assert tokens.of(messages) == text.encode(rendered, special=False)


def test_content_in_parts_is_one_text_and_images_are_one_bad_prompt(base: Path):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert Tokens(base).of([{"role": "user", "content": parts}]) == ids("user:hi;assistant:")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(BadPrompt, match=r"messages\[1\].content\[0\] is 'image_url': only parts of the type text"):
        Tokens(base).of([{"role": "system", "content": "x"}, {"role": "user", "content": [image]}])


def test_messages_that_the_template_refuses_are_one_bad_prompt(base: Path):
    with pytest.raises(BadPrompt, match="chat template refuses these messages: no tools"):
        Tokens(base).of([{"role": "tool", "content": "x"}])


def test_without_a_template_or_a_folder_no_conversation_can_be_read(base: Path):
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(UsageError, match=r"no chat template, so .* give text or token ids"):
        Tokens(base).of([{"role": "user", "content": "x"}])
    with pytest.raises(UsageError, match=r"chat messages need the base's tokenizer: give Swarm.attach the base folder"):
        Tokens(None).of([{"role": "user", "content": "x"}])


def test_integers_of_any_type_are_token_ids():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    for given in ([1, 2], (1, 2), range(1, 3), numpy.array([1, 2]), torch.tensor([1, 2])):
        assert Tokens(None).of(given) == (1, 2)
    for given in (numpy.array([1.0, 2.0]), torch.tensor([1.5]), torch.tensor([[1, 2]]), {1, 2}, ["1"], 3):
        with pytest.raises(BadPrompt, match="give token ids, a text, or chat messages"):
            Tokens(None).of(given)


@pytest.mark.parametrize(
    ("config", "context", "vocabulary"),
    [
        ({"max_position_embeddings": 1024, "vocab_size": 99}, 1024, 99),
        ({"n_positions": 512}, 512, None),
        ({"text_config": {"max_position_embeddings": 64, "vocab_size": 7}, "vocab_size": 9}, 64, 7),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384, None),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
            None,
        ),
        ({"max_position_embeddings": None, "vocab_size": True}, None, None),
        ({}, None, None),
    ],
)
def test_the_config_gives_the_context_and_the_vocabulary(config: dict, context: int | None, vocabulary: int | None):
    assert limits_of({"config.json": json.dumps(config).encode()}) == (context, vocabulary)


def test_a_config_without_limits_limits_nothing():
    limits = limits_of({"config.json": b"not json"})
    assert limits.why_not(pack_tokens([1 << 31] * 5000), 1 << 16) is None


def test_prompt_and_answer_may_fill_the_context_but_not_exceed_it():
    limits = limits_of({"config.json": b'{"max_position_embeddings": 1024}'})
    assert limits.why_not(pack_tokens([1] * 1000), 24) is None
    assert "ask for at most 24" in (limits.why_not(pack_tokens([1] * 1000), 25) or "")
    assert "5,000" in (limits.why_not(pack_tokens([1] * 5000), 1) or "")
