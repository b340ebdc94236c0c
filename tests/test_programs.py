import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from iep.errors import InputError
from iep.programs import MOST_TOKENS, QUESTION_TYPES, arities, arity, json_to_prefix, prefix_to_json, question_type
from iep.vocab import SPECIAL_TOKENS, Vocab, index_tokens, tokenize

quick = settings(deadline=None, derandomize=True, database=None)

UNARY = ("count", "exist", "unique", "filter_color[red]", "relate[left]", "same_size", "query_shape")
BINARY = ("union", "intersect", "equal_size", "equal_integer", "less_than", "greater_than")

prefix_trees = st.recursive(
    st.just(["scene"]),
    lambda trees: st.one_of(
        st.builds(lambda token, tree: [token, *tree], st.sampled_from(UNARY), trees),
        st.builds(lambda token, left, right: [token, *left, *right], st.sampled_from(BINARY), trees, trees),
    ),
    max_leaves=12,
)

# "Are there more red things than things left of the cube?", as CLEVR's release writes it.
MORE_RED = [
    {"inputs": [], "function": "scene", "value_inputs": []},
    {"inputs": [0], "function": "filter_color", "value_inputs": ["red"]},
    {"inputs": [1], "function": "count", "value_inputs": []},
    {"inputs": [], "function": "scene", "value_inputs": []},
    {"inputs": [3], "function": "filter_shape", "value_inputs": ["cube"]},
    {"inputs": [4], "function": "unique", "value_inputs": []},
    {"inputs": [5], "function": "relate", "value_inputs": ["left"]},
    {"inputs": [6], "function": "count", "value_inputs": []},
    {"inputs": [2, 7], "function": "greater_than", "value_inputs": []},
]
MORE_RED_PREFIX = [
    "greater_than",
    *("count", "filter_color[red]", "scene"),
    *("count", "relate[left]", "unique", "filter_shape[cube]", "scene"),
]


def test_a_json_program_becomes_its_prefix_and_comes_back_exactly():
    assert json_to_prefix(MORE_RED) == MORE_RED_PREFIX
    assert prefix_to_json(MORE_RED_PREFIX) == MORE_RED


@given(tokens=prefix_trees)
@settings(quick, max_examples=150)
def test_every_prefix_tree_survives_json_and_so_does_its_json(tokens):
    program = prefix_to_json(tokens)
    assert json_to_prefix(json.loads(json.dumps(program))) == tokens
    assert prefix_to_json(json_to_prefix(program)) == program
    assert [arity(token) for token in tokens] == [
        len(call["inputs"]) for call in sorted_by_prefix(program, len(program) - 1)
    ]


def sorted_by_prefix(program, root):
    """The calls of the tree at `root`, the root first."""
    below = [call for source in program[root]["inputs"] for call in sorted_by_prefix(program, source)]
    return [program[root], *below]


def test_the_generators_key_type_stands_for_function_and_absent_values_for_none():
    program = [{"type": "scene", "inputs": []}, {"type": "count", "inputs": [0], "value_inputs": None}]
    assert json_to_prefix(program) == ["count", "scene"]


def test_a_call_used_twice_is_written_out_twice():
    program = [
        {"function": "scene", "inputs": []},
        {"function": "unique", "inputs": [0]},
        {"function": "equal_size", "inputs": [1, 1]},
    ]
    assert json_to_prefix(program) == ["equal_size", "unique", "scene", "unique", "scene"]


def test_the_last_call_is_the_root_and_calls_that_it_does_not_need_are_left_out():
    program = [
        {"function": "scene", "inputs": []},
        {"function": "count", "inputs": [0]},
        {"function": "scene", "inputs": []},
    ]
    assert json_to_prefix(program) == ["scene"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([], "the program is empty"),
        ("scene", "the program is 'scene', expected a list of calls"),
        (["scene"], "program call 0 is 'scene', expected an object"),
        ([{"inputs": []}], "expected a function and at most one value"),
        (
            [{"function": "scene", "inputs": [], "value_inputs": ["a", "b"]}],
            "expected a function and at most one value",
        ),
        ([{"function": "scene", "inputs": [], "value_inputs": 3}], "expected a function and at most one value"),
        ([{"function": "count", "inputs": []}], r"program call 0 \(count\) has inputs \[\], expected 1"),
        ([{"function": "count", "inputs": 0}], r"program call 0 \(count\) has inputs 0, expected 1"),
        ([{"function": "count", "inputs": [0]}], r"program call 0 \(count\) has inputs \[0\], expected earlier calls"),
        ([{"function": "count", "inputs": [-1]}], "expected earlier calls"),
        ([{"function": "count", "inputs": ["0"]}], "expected earlier calls"),
    ],
)
def test_a_malformed_json_program_is_refused_by_call(program, message):
    with pytest.raises(InputError, match=message):
        json_to_prefix(program)


def test_a_program_that_would_be_too_long_in_prefix_order_is_refused_before_it_is_written_out():
    diamonds = [{"function": "union", "inputs": [call, call]} for call in range(26)]
    with pytest.raises(InputError, match=rf"call 9 \(union\) makes 1023 tokens, expected at most {MOST_TOKENS}"):
        json_to_prefix([{"function": "scene", "inputs": []}, *diamonds])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["<START>", "scene"], r"program token 0 \('<START>'\) is not of the form"),
        ([], "the program ends after 0 tokens, inside its tree"),
        (["union", "scene"], "the program ends after 2 tokens"),
        (["count", "scene", "scene"], r"program token 2 \(scene\) comes after the tree is complete"),
        (["count", "filter_color[red"], r"program token 1 \('filter_color\[red'\) is not of the form"),
        (["[red]", "scene"], "program token 0 .* is not of the form"),
    ],
)
def test_a_malformed_prefix_is_refused_by_token(tokens, message):
    with pytest.raises(InputError, match=message):
        prefix_to_json(tokens)


def test_arities_are_none_for_scene_two_for_comparisons_and_set_operations_one_otherwise():
    assert {arity(token) for token in BINARY} == {2}
    assert {arity(token) for token in (*UNARY, *SPECIAL_TOKENS, "equal", "equal-size")} == {1}
    expected = [1, 1, 1, 1, 1, 2, 0]
    assert arities((*SPECIAL_TOKENS, "count", "equal_color", "scene")).tolist() == expected
    assert arities(()).dtype == np.int64


def test_the_vocabulary_of_clevr_has_every_function_answer_and_the_empty_word():
    vocab = Vocab.clevr()
    assert (vocab.program, vocab.answer) == (index_tokens(vocab.program), index_tokens(vocab.answer))
    assert (len(vocab.program), len(vocab.answer)) == (4 + 40, 4 + 28)
    assert vocab.question == index_tokens(vocab.question)
    assert (len(vocab.question), vocab.question_index[""], vocab.question_index[";"]) == (93, 4, 5)


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("exist", "exist"),
        ("count", "count"),
        ("equal_integer", "compare integer: equal"),
        ("less_than", "compare integer: less"),
        ("greater_than", "compare integer: more"),
        ("query_material", "query: material"),
        ("equal_shape", "compare: shape"),
    ],
)
def test_a_questions_type_is_read_off_its_root(root, expected):
    assert question_type(root) == expected
    assert expected in QUESTION_TYPES


def test_tokenize_splits_on_every_single_space_and_sets_punctuation_apart():
    text = "There is a  red cube; is it, too, metal?"
    expected = ["There", "is", "a", "", "red", "cube", ";", "is", "it", ",", "too", ",", "metal"]
    assert tokenize(text) == expected


def vocabulary():
    return Vocab(index_tokens(["How", "", "many"]), index_tokens(["scene", "count"]), index_tokens(["yes", "2"]))


def test_tokens_are_indexed_special_ones_first_and_then_sorted():
    assert index_tokens(["b", "<END>", "a", "b"]) == (*SPECIAL_TOKENS, "a", "b")


def test_a_vocabulary_survives_its_file_in_the_published_format(tmp_path):
    path = tmp_path / "vocab.json"
    vocabulary().save(path)
    assert Vocab.load(path) == vocabulary()
    content = json.loads(path.read_text())
    assert content["program_token_to_idx"] == {
        **{token: index for index, token in enumerate(SPECIAL_TOKENS)},
        "count": 4,
        "scene": 5,
    }
    assert list(content) == ["question_token_to_idx", "program_token_to_idx", "answer_token_to_idx"]
    assert vocabulary().question_index[""] == 4


def test_the_order_of_a_vocabularys_file_does_not_matter():
    content = vocabulary().to_json()
    shuffled = {key: dict(reversed(table.items())) for key, table in content.items()}
    assert Vocab.from_json(shuffled, "vocab.json") == vocabulary()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: [], "vocab.json: not a vocabulary, expected a JSON object"),
        (lambda c: c.pop("answer_token_to_idx") and c, "'answer_token_to_idx' is missing"),
        (lambda c: c | {"program_token_to_idx": ["scene"]}, "'program_token_to_idx' is missing"),
        (
            lambda c: c | {"answer_token_to_idx": {"<NULL>": 0, "<START>": 2}},
            "answer_token_to_idx: indices are not 0 to 1",
        ),
        (
            lambda c: c | {"answer_token_to_idx": {"<NULL>": 0, "<START>": 0}},
            "answer_token_to_idx: indices are not 0 to 1",
        ),
        (lambda c: c | {"answer_token_to_idx": {"<NULL>": "0"}}, "answer_token_to_idx: indices are not 0 to 0"),
        (lambda c: c | {"answer_token_to_idx": {"<NULL>": 0.0}}, "answer_token_to_idx: indices are not 0 to 0"),
        (
            lambda c: c | {"answer_token_to_idx": {"<NULL>": 0, "<START>": True}},
            "answer_token_to_idx: indices are not 0 to 1",
        ),
        (lambda c: c | {"answer_token_to_idx": {"yes": 0}}, "expected <NULL>, <START>, <END>, <UNK> at indices 0 to 3"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_named_with_what_is_wrong(change, message):
    with pytest.raises(InputError, match=f"^vocab.json: .*{message.removeprefix('vocab.json: ')}"):
        Vocab.from_json(change(vocabulary().to_json()), "vocab.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8 text at byte 7"),
    ],
)
def test_a_vocabulary_file_that_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "vocab.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        Vocab.load(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)
