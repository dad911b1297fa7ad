"""What is typed, set and spelled as elsewhere. Without these a variable beats a flag, a flag that
is not offered is dropped in silence, or a user of another server cannot start ours."""

from __future__ import annotations

import pytest

from skippy_mesh.arguments import parse
from skippy_mesh.cli import _build_parser, main
from skippy_mesh.errors import UsageError


def parsed(*argv, **environ):
    return parse(*_build_parser(), argv, environ)


def args_of(*argv, **environ):
    return parsed(*argv, **environ).args


def serve(*argv, **environ):
    return args_of("serve", "demo", *argv, **environ)


def test_a_variable_stands_for_its_flag_and_what_is_typed_beats_it():
    environ = {"SKIPPY_PORT": "9000", "SKIPPY_MAX_QUEUE": "3", "SKIPPY_API_KEY": "k"}
    assert serve(**environ).port == 9000
    args = serve("--port", "8001", **environ)
    assert (args.port, args.max_queue, args.api_key) == (8001, 3, "k")


def test_the_word_for_the_model_beats_its_variable():
    assert args_of("serve", SKIPPY_MODEL="other").model == "other"
    assert serve(SKIPPY_MODEL="other").model == "demo"
    assert args_of("serve", "-m", "a.gguf", "--port", "1").model == "a.gguf"
    assert args_of("serve", "--port", "1", "a.gguf", "--spread").model == "a.gguf"
    with pytest.raises(UsageError, match="MODEL"):
        args_of("serve", "--port", "1")


def test_every_command_reads_its_own():
    assert args_of("generate", "demo", SKIPPY_PROMPT="two words").prompt == "two words"
    assert args_of("status", SKIPPY_URL="http://h:1", SKIPPY_PORT="7").url == "http://h:1"
    assert args_of("doctor", SKIPPY_CACHE_DIR="/tmp/x", SKIPPY_STAGES="2").stages == 2


@pytest.mark.parametrize(
    ("value", "is_set"), [("1", True), ("true", True), ("0", False), ("no", False), ("", False)]
)
def test_a_switch_is_on_or_off(value, is_set):
    assert serve(SKIPPY_SPREAD=value).spread is is_set


def test_a_switch_with_an_opposite_can_be_switched_off_and_typed_on():
    assert serve(SKIPPY_PREFIX_CACHE="0").prefix_cache is False
    assert serve(SKIPPY_NO_PREFIX_CACHE="1").prefix_cache is False
    assert serve("--prefix-cache", SKIPPY_PREFIX_CACHE="0").prefix_cache is True
    assert serve("--no-enable-prefix-caching").prefix_cache is False


def test_our_own_spelling_beats_a_synonym_in_the_environment():
    assert serve(SKIPPY_PARALLEL="2", SKIPPY_MAX_NUM_SEQS="5").parallel == 2


def test_nodes_that_are_typed_replace_those_of_the_environment():
    environ = {"SKIPPY_NODE": "a=1GiB b=2GiB"}
    assert [node.name for node in args_of("plan", "demo", **environ).node] == ["a", "b"]
    typed = args_of("plan", "demo", "--node", "c=1GiB", **environ)
    assert [node.name for node in typed.node] == ["c"]


def test_a_bad_variable_is_named():
    with pytest.raises(UsageError, match=r"'x'.*; in the environment: SKIPPY_PORT$"):
        serve(SKIPPY_PORT="x")
    with pytest.raises(UsageError, match="SKIPPY_SPREAD takes 1 or 0, got 'maybe'"):
        serve(SKIPPY_SPREAD="maybe")


def test_another_servers_variables_are_named_once_and_not_read():
    found = parsed("serve", "demo", LLAMA_ARG_PORT="1", LLAMA_ARG_CTX_SIZE="2")
    assert found.args.port == 8000
    (notice,) = found.notices
    assert "LLAMA_ARG_CTX_SIZE, LLAMA_ARG_PORT" in notice and "not read" in notice


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (("--ctx-size", "8192"), "ctx_size", 8192),
        (("--max-num-seqs", "4"), "parallel", 4),
        (("--pipeline-parallel-size", "3"), "stages", 3),
        (("--max-num-queued-reqs", "9"), "max_queue", 9),
        (("--max-num-queued-tokens", "9"), "max_queue_tokens", 9),
        (("--served-model-name", "m"), "alias", "m"),
        (("--tokenizer", "t"), "tokenizer_id", "t"),
        (("--gpu-memory-utilization", "0.5"), "memory_fraction", 0.5),
        (("--kv-cache-dtype", "auto"), "kv", "q8_0"),
        (("-ctk", "bf16", "-ctv", "bf16"), "kv", "bf16"),
        (("--no-cache-prompt",), "prefix_cache", False),
        (("--kv-unified-per-slot", "100"), "max_model_len", 100),
        (("--no-mmap",), "load_mode", "none"),
        (("--mlock",), "load_mode", "mlock"),
        (("-lm", "mmap+mlock"), "load_mode", "mmap+mlock"),
        (("-lv", "4"), "log_level", "debug"),
        (("--uvicorn-log-level", "error"), "log_level", "error"),
        (("-t", "3", "-tb", "3"), "threads", 3),
    ],
)
def test_a_synonym_is_the_same_flag(argv, name, value):
    assert getattr(serve(*argv), name) == value


def test_what_is_so_anyway_is_one_notice_and_leaves_no_trace():
    found = parsed("serve", "demo", "-cb", "--jinja", "-fa", "on", "-b", "512", "-tp", "1")
    assert found.notices == ("no effect here: -cb, --jinja, -fa on, -b 512, -tp 1",)
    assert vars(found.args) == vars(serve())
    assert not {"ignored", "cache_type_k", "cache_type_v"} & vars(found.args).keys()
    assert parsed("serve", "demo").notices == ()


@pytest.mark.parametrize(
    "argv",
    [
        ("-no-kvu",), ("-nocb",), ("--context-shift",), ("--rpc", "h:1"), ("--rpc=h:1",),
        ("-fa", "off"), ("--tensor-parallel-size", "2"), ("--embedding",), ("--lora", "a"),
        ("--mmproj", "b"), ("-md", "c"), ("--draft-max", "4"), ("-b", "2048"), ("-ngl", "99"),
        ("-ctk", "q8_0", "-ctv", "f16"), ("--kv-cache-dtype", "fp8"),
        ("--distributed-executor-backend", "mp"), ("-tb", "3"), ("-tb", "3", "-t", "2"),
        ("--load-mode", "tape"), ("--log-level", "chatty"), ("-lv", "9"), ("-sm", "row"),
        ("--fit-target", "512"), ("--override-generation-config", "{}"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_refused_with_its_name(argv, capsys):
    assert main(["serve", "demo", *argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert argv[0].partition("=")[0] in said.err
