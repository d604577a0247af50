"""Stop strings, finish reasons and counts are the same however tokens are grouped."""

from __future__ import annotations

import pytest
from http_worker import TOKENIZER
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Output, TokenLogprob
from openai_api.assembly import ChoiceText, Delta, StopScanner, TextRules

EOS = 2


def outputs(ids: list[int], sizes: list[int], finish: str | None, stop_reason: int | None = None) -> list[Output]:
    made, at = [], 0
    for size in [*sizes, len(ids)]:
        if at < len(ids):
            made.append(Output("r", 0, ids[at : at + size], [TokenLogprob(t, -1.0) for t in ids[at : at + size]]))
            at += size
    made[-1].finish_reason, made[-1].stop_reason = finish, stop_reason
    return made


def run(rules: TextRules, made: list[Output]) -> tuple[str, ChoiceText, list[Delta]]:
    choice, deltas = ChoiceText(TOKENIZER, rules), []
    for output in made:
        if not choice.finished:
            deltas.append(choice.feed(output))
    return "".join(delta.text for delta in deltas), choice, deltas


def rules(*stops: str, **others: object) -> TextRules:
    return TextRules(stops=stops, eos_token_ids=frozenset({EOS}), **others)  # type: ignore[arg-type]


texts = st.text("ab ", min_size=1, max_size=30)
stop_lists = st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3)


@given(texts, stop_lists, st.lists(st.integers(1, 5), max_size=12), st.booleans())
@settings(max_examples=200, deadline=None)
def test_grouping_changes_nothing(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    ids = TOKENIZER.encode(text)
    settings_ = rules(*stops, include_stop=include)
    one, choice_one, _ = run(settings_, outputs(ids, [1] * len(ids), "length"))
    some, choice_some, deltas = run(settings_, outputs(ids, sizes, "length"))
    assert one == some
    assert choice_one.token_count == choice_some.token_count
    assert (choice_one.finish_reason, choice_one.stop_reason) == (choice_some.finish_reason, choice_some.stop_reason)
    assert sum(len(delta.entries) for delta in deltas) == choice_some.token_count
    assert sum(len(delta.token_ids) for delta in deltas) == choice_some.token_count


@given(texts, stop_lists, st.booleans())
@settings(max_examples=200, deadline=None)
def test_scanner_against_the_plain_search(text: str, stops: list[str], include: bool) -> None:
    """By the character, the first stop string to be complete ends the text."""
    expected, found = text, None
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            found = max(done, key=len)
            expected = text[:end] if include else text[: end - len(found)]
            break
    scanner, shown, stopped = StopScanner(stops, include), "", None
    for character in text:
        part, stopped = scanner.push(character)
        shown += part
        if stopped is not None:
            break
    if stopped is None:
        shown += scanner.release()
    assert (shown, stopped) == (expected, found)


@given(texts, stop_lists, st.lists(st.integers(1, 6), max_size=10))
@settings(max_examples=200, deadline=None)
def test_nothing_of_a_stop_string_is_ever_shown(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner, shown, at = StopScanner(stops), "", 0
    for size in [*cuts, len(text)]:
        part, stop = scanner.push(text[at : at + size])
        at += size
        shown += part
        assert not any(stop_ in shown for stop_ in stops)
        if stop is not None:
            return
        assert text.startswith(shown)


def test_stop_string_across_tokens() -> None:
    ids = TOKENIZER.encode("one two END three")
    text, choice, _ = run(rules(" END"), outputs(ids, [1] * len(ids), "length"))
    assert (text, choice.finish_reason, choice.stop_reason) == ("one two", "stop", " END")
    assert TOKENIZER.decode(ids[: choice.token_count]).endswith(" END")
    assert not TOKENIZER.decode(ids[: choice.token_count - 1]).endswith(" END")


def test_stop_string_shown_on_demand() -> None:
    ids = TOKENIZER.encode("a stop b")
    text, _, _ = run(rules("stop", include_stop=True), outputs(ids, [99], "length"))
    assert text == "a stop"


def test_held_back_text_comes_at_the_end() -> None:
    ids = TOKENIZER.encode("wait EN")
    text, choice, deltas = run(rules("END"), outputs(ids, [1] * len(ids), "length"))
    assert text == "wait EN"
    assert choice.finish_reason == "length"
    assert deltas[-1].text.endswith("EN")


def test_eos_is_counted_and_not_shown() -> None:
    ids = [*TOKENIZER.encode("hi"), EOS]
    text, choice, _ = run(rules(skip_special_tokens=False), outputs(ids, [99], "stop"))
    assert (text, choice.finish_reason, choice.stop_reason, choice.token_count) == ("hi", "stop", None, len(ids))


def test_eos_as_the_first_token() -> None:
    text, choice, deltas = run(rules(), outputs([EOS], [1], "stop"))
    assert (text, choice.finish_reason, choice.token_count) == ("", "stop", 1)
    assert len(deltas[0].entries) == 1


@pytest.mark.parametrize(("include", "shown"), [(False, "x"), (True, "xA")])
def test_stop_token_id(include: bool, shown: str) -> None:
    token = TOKENIZER.encode("A")[0]
    ids = [*TOKENIZER.encode("x"), token]
    text, choice, _ = run(rules(include_stop=include), outputs(ids, [1, 1], "stop", token))
    assert (text, choice.finish_reason, choice.stop_reason) == (shown, "stop", token)


def test_ignored_eos_is_a_token_like_others() -> None:
    ids = [EOS, *TOKENIZER.encode("B")]
    text, choice, _ = run(TextRules(), outputs(ids, [1, 1], "length"))
    assert (text, choice.finish_reason, choice.token_count) == ("B", "length", 2)


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = TOKENIZER.encode("a a a a a")
    free, choice, _ = run(rules(" a"), outputs(ids, [1] * len(ids), "length"))
    assert (free, choice.token_count) == ("a", 2)
    late, choice, _ = run(rules(" a", min_tokens=4), outputs(ids, [1] * len(ids), "length"))
    assert (late, choice.token_count) == ("a a a", 4)


def test_a_stop_string_that_ended_the_first_token_elsewhere_ends_it_here_too() -> None:
    """The generation worker replays the token of a choice that the context worker marked as ended."""
    token = TOKENIZER.encode("A")[0]
    text, choice, _ = run(rules("A"), outputs([token], [1], "stop"))
    assert (text, choice.finish_reason, choice.stop_reason) == ("", "stop", "A")


def test_not_finished_is_no_end() -> None:
    _, choice, deltas = run(rules(), outputs(TOKENIZER.encode("A"), [1], "not_finished"))
    assert choice.finish_reason is None
    assert deltas[0].finish_reason is None


def test_text_offsets_count_characters_before_the_token() -> None:
    ids = TOKENIZER.encode("é ab")
    _, _, deltas = run(rules(), outputs(ids, [1] * len(ids), "length"))
    offsets = [entry.offset for delta in deltas for entry in delta.entries]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] < 4
