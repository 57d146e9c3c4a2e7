# SPDX-License-Identifier: Apache-2.0
"""The forms that an answer may be asked to have: what becomes of them, and which are refused why."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, write_byte_tokenizer
from twinpool.config import RouterSection
from twinpool.errors import TwinpoolError
from twinpool.router.structured import MAX_CHECKED, GrammarCheck, check_together, grammar_of
from twinpool.v1 import inference_pb2 as pb

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'


def choices(*texts: str) -> pb.StructuredOutput:
    return pb.StructuredOutput(choices=pb.Choices(texts=texts))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    root = write_byte_tokenizer(tmp_path_factory.mktemp("model"))
    return LLTokenizer((root / "tokenizer.json").read_text(), n_vocab=VOCAB_SIZE, eos_token=EOS)


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (pb.StructuredOutput(json_schema=SCHEMA), '{"a": 12}', '{"a": 12, "b": 1}'),
        (pb.StructuredOutput(json_schema=SCHEMA), '{"a": -1}', '{ "a": -1}'),
        (pb.StructuredOutput(json_schema="{}"), '[1, {"x": null}]', "nul"),
        (pb.StructuredOutput(regex="[0-9]{3}-[a-z]+"), "123-ab", "12-ab"),
        (pb.StructuredOutput(lark='start: "yes" | /n+o/'), "nnno", "yesno"),
        (choices("red", 'a "b"\n', "grün"), 'a "b"\n', "gru"),
        (choices("red", "redder"), "redder", "redd"),
    ],
)
def test_forms(tokenizer: LLTokenizer, wanted: pb.StructuredOutput, good: str, bad: str) -> None:
    grammar = grammar_of(wanted)
    GrammarCheck(RouterSection()).check(grammar)
    assert accepts(tokenizer, grammar, good)
    assert not accepts(tokenizer, grammar, bad)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (pb.StructuredOutput(), "names no form"),
        (pb.StructuredOutput(json_schema="[1]"), "json_schema is not a JSON object"),
        (pb.StructuredOutput(json_schema="[" * 100_000), "json_schema is not a JSON object"),
        (pb.StructuredOutput(json_schema='{"type": "strange"}'), "cannot be compiled.*strange"),
        (pb.StructuredOutput(json_schema='{"type": "string", "minLength": 9, "maxLength": 1}'), "Unsatisfiable"),
        (pb.StructuredOutput(json_schema='{"$ref": "https://example.com/x"}'), "cannot be compiled"),
        (pb.StructuredOutput(regex="(a"), "unclosed"),
        (pb.StructuredOutput(lark="start: missing"), "missing"),
        (pb.StructuredOutput(regex="a" * 3000), "the limit is 2000"),
        (choices(), "holds no text"),
        (choices("a", ""), "holds no text, or an empty one"),
    ],
)  # fmt: skip
def test_what_is_impossible_is_refused_with_the_reason(wanted: pb.StructuredOutput, says: str) -> None:
    check = GrammarCheck(RouterSection(max_grammar_bytes=2000))
    with pytest.raises(TwinpoolError, match=says) as caught:
        check.check(grammar_of(wanted))
    assert caught.value.reason == "INVALID_GRAMMAR"
    assert caught.value.field is not None


def test_what_is_known_to_be_good_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck(RouterSection())
    grammar = grammar_of(pb.StructuredOutput(json_schema=SCHEMA))
    check.check(grammar)
    with monkeypatch.context() as patched:
        patched.setattr(LLMatcher, "validate_grammar_with_warnings", None, raising=False)
        check.check(grammar)
    for number in range(MAX_CHECKED + 5):
        check.check(grammar_of(choices(f"text {number}")))
    assert len(check._good) == MAX_CHECKED


@pytest.mark.parametrize("stop", [pb.StopConditions(min_tokens=1), pb.StopConditions(ignore_eos=True)])
def test_a_form_ends_the_answer(stop: pb.StopConditions) -> None:
    with pytest.raises(TwinpoolError) as caught:
        check_together(pb.GenerateRequest(stop=stop))
    assert caught.value.reason == "INVALID_STOP"
    check_together(pb.GenerateRequest(stop=pb.StopConditions(max_tokens=3, stop_strings=["x"])))


def test_a_grammar_is_the_same_text_for_the_same_schema() -> None:
    spaced = json.dumps(json.loads(SCHEMA), indent=4)
    assert grammar_of(pb.StructuredOutput(json_schema=spaced)) == grammar_of(
        pb.StructuredOutput(json_schema=SCHEMA)
    )
