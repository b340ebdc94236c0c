"""Programs as JSON, as prefix tokens and as trees, their questions' types, and the vocabularies of their tokens."""

import json

import hypothesis.strategies as st
import pytest
from batching_cases import quick
from hypothesis import example, given, settings
from tiny_data import refused

from iep.batching.reference import run_prefix
from iep.programs import (
    arities,
    arity,
    json_to_prefix,
    named,
    prefix_to_json,
    program_tree,
    split_program,
    tokens_run,
    tree_lines,
    without,
)
from iep.vocab import NULL, SPECIAL_TOKENS, START, Vocab, index_tokens, tokenize

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


@given(tokens=prefix_trees)
@settings(quick, max_examples=150)
def test_every_prefix_tree_survives_json_and_so_does_its_json(tokens):
    program = prefix_to_json(tokens)
    assert json_to_prefix(json.loads(json.dumps(program))) == tokens
    assert prefix_to_json(json_to_prefix(program)) == program


def test_a_prefix_becomes_json_as_clevrs_release_writes_it():
    assert prefix_to_json(["greater_than", "count", "filter_color[red]", "scene", "count", "scene"]) == [
        {"inputs": [], "function": "scene", "value_inputs": []},
        {"inputs": [0], "function": "filter_color", "value_inputs": ["red"]},
        {"inputs": [1], "function": "count", "value_inputs": []},
        {"inputs": [], "function": "scene", "value_inputs": []},
        {"inputs": [3], "function": "count", "value_inputs": []},
        {"inputs": [2, 4], "function": "greater_than", "value_inputs": []},
    ]


def test_the_last_call_is_the_root_shared_calls_are_written_out_and_unused_ones_left_out():
    """The keys of CLEVR's generator stand for those of the release, and absent values for none."""
    program = [
        {"type": "scene", "inputs": [], "value_inputs": None},
        {"type": "filter_shape", "inputs": [0], "side_inputs": ["mountain bike"]},
        {"function": "count", "inputs": [0]},
        {"function": "equal_size", "inputs": [1, 1]},
    ]
    tokens = ["equal_size", *(shared := ["filter_shape[mountain bike]", "scene"]), *shared]
    assert json_to_prefix(program) == tokens
    assert split_program(" ".join(tokens)) == tokens


CALL = {"function": "scene", "inputs": []}


@pytest.mark.parametrize(
    ("read", "program", "message"),
    [
        (json_to_prefix, [], "the program is empty"),
        (json_to_prefix, "scene", "the program is 'scene', expected a list of calls"),
        (json_to_prefix, [{"inputs": []}], "expected a function and at most one value"),
        (json_to_prefix, [{"function": "scene", "inputs": [], "value_inputs": ["a", "b"]}], "at most one value"),
        (json_to_prefix, [{"function": "count", "inputs": []}], "program call 0 (count) has inputs [], expected 1"),
        (
            json_to_prefix,
            [{"function": "count", "inputs": [0]}],
            "call 0 (count) has inputs [0], expected earlier calls",
        ),
        (
            json_to_prefix,
            [CALL, {"function": "filter_color", "inputs": [0], "value_inputs": []}],
            "call 1 (filter_color) has no value, expected one in 'value_inputs'",
        ),
        (
            json_to_prefix,
            [CALL, *({"function": "union", "inputs": [n, n]} for n in range(60))],
            "call 9 (union) has 1,023 tokens with all calls that it reads, written out; expected at most 998",
        ),
        (prefix_to_json, ["union", "scene"], "the program ends after 2 tokens"),
        (prefix_to_json, ["count", "scene", "scene"], "program token 2 (scene) comes after the tree is complete"),
        (prefix_to_json, ["count", "filter_color[red"], "program token 1 ('filter_color[red') is not of the form"),
    ],
)
def test_a_malformed_program_is_an_error_that_names_call_or_token(read, program, message):
    with refused("", message):
        read(program)


def test_arities_are_none_for_scene_two_for_comparisons_and_set_operations_one_otherwise():
    assert {arity(token) for token in BINARY} == {2}
    assert {arity(token) for token in (*UNARY, *SPECIAL_TOKENS, "equal", "equal-size")} == {1}
    assert arities((*SPECIAL_TOKENS, "count", "equal_color", "scene")).tolist() == [1, 1, 1, 1, 1, 2, 0]


# Trees


WORDS = (*SPECIAL_TOKENS, "scene", "count", "filter_color[red]", "union", "equal_size")
SCENE = WORDS.index("scene")


@given(st.lists(st.sampled_from(WORDS), max_size=12))
@example([])
@example(["<START>", "union", "<END>", "<NULL>", "<NULL>"])
@settings(quick)
def test_the_tree_is_the_one_that_the_engine_walks(tokens):
    def nested(number):
        return tree.nodes[number].token, *map(nested, tree.nodes[number].arguments)

    def called(token, *arguments):
        return (WORDS[token], *(() if token == SCENE else arguments))

    tree = program_tree(tokens)
    indices = [WORDS.index(token) for token in tokens]
    expected = run_prefix(indices, lambda token: arity(WORDS[token]), called, None, SCENE, skip=START, pad=NULL)
    assert nested(0) == expected


@pytest.mark.parametrize(
    ("text", "unused", "lines", "ignored"),
    [
        ("<START> count <END>", {}, ["count", "└─ <END>", "   └─ scene (filled in)"], ()),
        ("<START> scene union <NULL> count <END> count", {}, ["scene"], ("union", "count")),
        (
            "union count filter_color[red]",
            {1: "not used: why"},
            [
                "union",
                "├─ count (not used: why)",
                "│  └─ filter_color[red] (not used)",
                "│     └─ scene (filled in; not used)",
                "└─ scene (filled in)",
            ],
            (),
        ),
    ],
)
def test_a_tree_is_drawn_with_what_is_filled_in_ignored_and_not_used(text, unused, lines, ignored):
    tree = without(program_tree(text.split()), unused)
    assert tree_lines(tree, named) == lines
    assert tree.ignored == ignored
    assert not unused or tokens_run(tree) == ["union", "scene", "scene"]


# Vocabularies


def test_the_vocabulary_of_clevr_has_every_function_answer_and_the_empty_word():
    vocab = Vocab.clevr()
    assert (vocab.program, vocab.answer) == (index_tokens(vocab.program), index_tokens(vocab.answer))
    assert (len(vocab.program), len(vocab.answer)) == (4 + 40, 4 + 28)
    assert vocab.question == index_tokens(vocab.question)
    assert (len(vocab.question), vocab.question_index[""], vocab.question_index[";"]) == (93, 4, 5)


def test_tokenize_splits_on_every_single_space_and_sets_punctuation_apart():
    text = "There is a  red cube; is it, too, metal?"
    expected = ["There", "is", "a", "", "red", "cube", ";", "is", "it", ",", "too", ",", "metal"]
    assert tokenize(text) == expected


def vocabulary():
    return Vocab(index_tokens(["How", "", "many"]), index_tokens(["scene", "count"]), index_tokens(["yes", "2"]))


def test_a_vocabulary_survives_its_file_in_the_published_format(tmp_path):
    path = tmp_path / "vocab.json"
    vocabulary().save(path)
    assert Vocab.load(path) == vocabulary()
    content = json.loads(path.read_text())
    assert list(content) == ["question_token_to_idx", "program_token_to_idx", "answer_token_to_idx"]
    assert content["program_token_to_idx"] == {token: n for n, token in enumerate((*SPECIAL_TOKENS, "count", "scene"))}
    shuffled = {key: dict(reversed(table.items())) for key, table in content.items()}
    assert Vocab.from_json(shuffled, "vocab.json") == vocabulary(), "the order of entries does not matter"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: [], "not a vocabulary, expected a JSON object"),
        (lambda c: c.pop("answer_token_to_idx") and c, "'answer_token_to_idx' is missing"),
        (lambda c: c | {"program_token_to_idx": ["scene"]}, "'program_token_to_idx' is missing"),
        (lambda c: c | {"answer_token_to_idx": {"<NULL>": 0, "<START>": 2}}, "indices are not 0 to 1"),
        (lambda c: c | {"answer_token_to_idx": {"yes": 0}}, "expected <NULL>, <START>, <END>, <UNK> at indices 0 to 3"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_named_with_what_is_wrong(change, message):
    with refused("vocab.json: ", message):
        Vocab.from_json(change(vocabulary().to_json()), "vocab.json")
