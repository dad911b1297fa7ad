"""From the flags of ``serve``. Without these a bound is not the one promised, or a key is shown."""

from __future__ import annotations

import json
from fractions import Fraction
from types import SimpleNamespace

import pytest

from skippy_mesh.api_flags import (
    TOOL_PARSERS,
    check_web,
    keys_of,
    limits_of,
    names_of,
    rules_of,
    template_of,
)
from skippy_mesh.cli import build_parser
from skippy_mesh.errors import RequestError, UsageError
from skippy_mesh.gateway.errors import digests_of
from skippy_mesh.gateway.server import GatewaySpec, is_loopback
from skippy_mesh.gateway.tools import SYNTAXES
from skippy_mesh.serving import _check_model_len, _shown, bounds_of, short_stop
from skippy_mesh.starting import settings_of
from stages.gguf_file import ModelFile


@pytest.fixture(scope="module")
def model(demo):
    return ModelFile.open(demo)


def flags(*arguments):
    return build_parser().parse_args(["serve", "/models/tiny.gguf", *arguments])


@pytest.mark.parametrize(
    ("arguments", "ceiling", "bounds"),
    [
        ((), 16, (64, 4 * 4096)),
        ((), 2, (16, 4 * 4096)),
        (("--max-queue", "0", "--max-queue-tokens", "7"), 16, (0, 7)),
    ],
)
def test_the_queue_is_four_times_what_runs_and_four_pools_of_tokens(arguments, ceiling, bounds):
    limits = bounds_of(flags(*arguments)).limits(ceiling=ceiling, num_cells=4096)
    assert (limits.max_queue, limits.max_queue_tokens) == bounds
    assert (limits.ceiling, limits.queue_timeout_s) == (ceiling, 0)


def test_a_bound_below_zero_is_refused_before_anything_is_loaded():
    with pytest.raises(UsageError, match="--max-queue must be 0 or more, got -1"):
        bounds_of(flags("--max-queue", "-1")).limits(ceiling=1, num_cells=1)


@pytest.mark.parametrize(
    ("asked", "context", "num_cells", "says"),
    [
        (4097, 4096, 4096, "4097 is more than 4096, the pool: lower it, or raise --ctx-size"),
        (4097, 4096, 8192, "4097 is more than 4096, what the model was trained for: lower it$"),
    ],
)
def test_a_request_cannot_have_more_tokens_than_there_are(asked, context, num_cells, says):
    with pytest.raises(UsageError, match=says):
        _check_model_len(asked, SimpleNamespace(context=context, num_cells=num_cells))
    _check_model_len(context, SimpleNamespace(context=context, num_cells=num_cells))
    _check_model_len(None, SimpleNamespace(context=context, num_cells=num_cells))
    with pytest.raises(UsageError, match="2 tokens at least, got 1"):
        settings_of(flags("--max-model-len", "1"))


def test_the_status_shows_neither_keys_nor_folders():
    args = flags("--api-key", "secret,other", "--step-log", "/var/log/steps")
    args.some_fraction = Fraction(85, 100)
    text = json.dumps(_shown(args))
    assert not any(word in text for word in ("secret", "other", "/models", "/var"))
    assert {"model", "api_key", "max_queue"} <= _shown(args).keys()


def test_keys_come_from_the_flag_and_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the lab\nthree\n\n  four \n")
    assert keys_of(flags()) == ()
    args = flags("--api-key", "one, two", "--api-key-file", str(path))
    assert keys_of(args) == ("one", "two", "three", "four")
    assert "three" not in json.dumps(_shown(args))


@pytest.mark.parametrize("text", [None, "# nothing\n"])
def test_a_file_without_a_key_does_not_open_the_server_to_all(tmp_path, text):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match="--api-key-file"):
        keys_of(flags("--api-key-file", str(path)))


@pytest.mark.parametrize(
    ("host", "keys", "is_open"),
    [
        ("127.0.0.1", (), False), ("localhost", (), False), ("::1", (), False),
        ("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("192.0.2.1", (), True),
    ],
)  # fmt: skip
def test_an_open_address_without_a_key_is_seen(host, keys, is_open):
    assert is_loopback(host) == (host not in ("0.0.0.0", "192.0.2.1"))
    spec = GatewaySpec(
        host=host, port=1, model_path="m", model_name="m", key_digests=digests_of(*keys)
    )
    assert spec.is_open == is_open


def test_the_api_is_as_the_flags_say(model):
    args = flags(
        "--alias", "big,small", "--tokenizer-id", "lab/x", "--temp", "0.5", "--seed", "9",
        "-n", "77", "--max-n", "3", "--strict-model", "--scheduling-policy", "priority",
        "--max-request-bytes", "1000", "--ready-window-s", "5",
    )  # fmt: skip
    rules, limits = rules_of(args, model), limits_of(args)
    assert names_of(args, model) == ("big", "small")
    assert names_of(flags(), model) == (model.paths[0].stem,)
    assert rules.aliases == ("small",)
    assert rules.defaults == {"temperature": 0.5, "seed": 9}
    assert (rules.max_chat_tokens, rules.max_n, rules.knows_priority) == (77, 3, True)
    assert (rules.is_strict_model, rules.is_strict_field) == (True, False)
    assert (limits.max_body_bytes, limits.ready_window_s) == (1000, 5)
    assert rules.facts["n_embd"] == model.width
    assert rules.facts["size"] == sum(tensor.num_bytes for tensor in model.tensors.values())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--temp", "3"), RequestError),
        (("--top-p", "0"), RequestError),
        (("--max-n", "0"), UsageError),
        (("-n", "0"), UsageError),
        (("--max-request-bytes", "0"), UsageError),
        (("--stream-stall-timeout-s", "-1"), UsageError),
    ],
)
def test_a_default_that_no_request_may_have_is_refused_at_the_start(model, arguments, error):
    args = flags(*arguments)
    with pytest.raises(error):
        limits_of(args)
        rules_of(args, model)


def test_the_names_of_tool_parsers_are_those_there_are():
    assert set(TOOL_PARSERS) == set(SYNTAXES)


def test_a_template_of_the_operators_stands_for_the_models(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}")
    assert template_of(flags()) is None
    assert template_of(flags("--chat-template", "x")) == "x"
    assert template_of(flags("--chat-template-file", str(path))) == "{{ messages[0].content }}"
    with pytest.raises(UsageError, match="--chat-template-file"):
        template_of(flags("--chat-template-file", str(tmp_path / "none")))


@pytest.mark.parametrize("arguments", [("--ssl-keyfile", "k"), ("--ssl-certfile", "no-such-file")])
def test_a_certificate_that_cannot_be_used_is_refused_at_the_start(arguments):
    with pytest.raises(UsageError, match="--ssl-"):
        check_web(flags(*arguments))


@pytest.mark.parametrize(
    ("environ", "drain_s", "says"),
    [
        ({}, 60, None),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, 2, None),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, 5, "kills after 3 s, and --drain-s is 5"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "60"}, 5, None),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "9"}, 9, '"24"'),
    ],
)
def test_a_job_whose_stop_would_kill_who_still_runs_is_warned_of(environ, drain_s, says):
    warning = short_stop(environ, drain_s)
    assert warning is None if says is None else says in warning
