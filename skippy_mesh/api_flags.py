"""Flags of ``serve`` that shape the API: names, keys, defaults and limits of requests, metrics."""

from __future__ import annotations

import argparse
import math
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from skippy_mesh.config import METRICS_ALIASES
from skippy_mesh.errors import UsageError
from skippy_mesh.logs import LEVELS, level_of

if TYPE_CHECKING:
    from skippy_mesh.gateway.rules import ApiRules
    from skippy_mesh.gateway.token_stream import Limits
    from stages.gguf_file import ModelFile

# Flags that stand for sampling fields a request leaves out, and the fields.
_DEFAULTS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repeat_penalty": "repetition_penalty", "seed": "seed",
}  # fmt: skip
_FILE_TYPE = "general.file_type"
TOOL_PARSERS = ("hermes", "llama3_json", "qwen3_coder", "deepseek_v31")
"""Those of gateway/tools.py, which takes longer to import than --help may take."""


def add_api_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", default="", metavar="K[,K2]", help="require one of these keys")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="more keys, one a line; # begins a comment"
    )
    parser.add_argument(
        "-a", "--alias", "--served-model-name", default="", metavar="NAME[,NAME2]",
        help="what the model is called in the API (the file's name)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer-id", "--tokenizer", metavar="ID",
        help="where clients find the tokenizer (model card's root)",
    )  # fmt: skip
    parser.add_argument(
        "--strict-model", action="store_true", help="404 for requests to a model of another name"
    )
    parser.add_argument(
        "--strict-fields", action="store_true", help="400 for fields that nobody knows"
    )
    _add_limit_flags(parser)
    _add_template_flags(parser)
    _add_web_flags(parser)
    _add_metrics_flags(parser)
    _add_log_flags(parser)
    for flag, kind, what in (
        ("--temp", float, "temperature"), ("--top-k", int, "top_k"), ("--top-p", float, "top_p"),
        ("--min-p", float, "min_p"), ("--repeat-penalty", float, "repetition_penalty"),
    ):  # fmt: skip
        parser.add_argument(flag, type=kind, metavar="X", help=f"default {what} of requests")
    parser.add_argument("-s", "--seed", type=int, metavar="S", help="default seed of requests")
    parser.add_argument(
        "-n", "--default-max-tokens", type=int, metavar="N", help="default max_tokens of chats"
    )


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-n", type=int, default=8, metavar="N", help="answers to one prompt (%(default)s)"
    )
    parser.add_argument(
        "--max-request-bytes", type=int, default=16 << 20, metavar="N",
        help="of a request's body (16 MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--request-timeout-s", type=float, default=0.0, metavar="S",
        help="end a request that takes longer in all (0: off)",
    )  # fmt: skip
    parser.add_argument(
        "--stream-stall-timeout-s", type=float, default=60.0, metavar="S",
        help="end a stream that nobody has read for so long (%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--drain-s", type=float, default=5.0, metavar="S",
        help="told to end, let run for so long what runs (%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--ready-window-s", type=float, default=30.0, metavar="S",
        help="/ready sends a token through all stages if none has passed for so long (%(default)g)",
    )  # fmt: skip


def _add_template_flags(parser: argparse.ArgumentParser) -> None:
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--chat-template", metavar="TEXT", help="instead of the model's own")
    template.add_argument("--chat-template-file", metavar="FILE", help="the same, from a file")
    parser.add_argument(
        "--tool-parser", "--tool-call-parser", choices=TOOL_PARSERS,
        help="how the model writes tool calls (by its template)",
    )  # fmt: skip


def _add_web_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ssl-keyfile", "--ssl-key-file", metavar="FILE", help="of the server's certificate"
    )
    parser.add_argument(
        "--ssl-certfile", "--ssl-cert-file", metavar="FILE",
        help="answer HTTPS with this certificate",
    )  # fmt: skip
    parser.add_argument(
        "--cors-origins", "--allowed-origins", default="", metavar="O[,O2]",
        help="pages of these origins may ask (none)",
    )  # fmt: skip
    parser.add_argument(
        "--root-path", "--api-prefix", default="", metavar="P", help="what a proxy takes off paths"
    )


def check_web(args: argparse.Namespace) -> None:
    """:class:`UsageError` for a certificate that cannot be used."""
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        raise UsageError("--ssl-keyfile needs --ssl-certfile")
    if args.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--ssl-certfile {args.ssl_certfile}: {error}") from None


def template_of(args: argparse.Namespace) -> str | None:
    """The chat template that stands for the model's, None for the model's."""
    if args.chat_template_file is None:
        template: str | None = args.chat_template
        return template
    try:
        return Path(args.chat_template_file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template-file {args.chat_template_file}: {error}") from None


def _add_metrics_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-aliases", default=",".join(METRICS_ALIASES), metavar="NAMES",
        help="whose names /metrics has beside ours, so that their dashboards work; may be empty "
        "(%(default)s)",
    )  # fmt: skip
    parser.add_argument("--metrics-auth", action="store_true", help="/metrics needs a key, too")
    parser.add_argument(
        "--no-ray-board", action="store_true",
        help="do not show the numbers to Ray, for its dashboards (off by itself without Ray)",
    )  # fmt: skip


def keys_of(args: argparse.Namespace) -> tuple[str, ...]:
    """All keys that let a request in; none means that none is needed."""
    lines = args.api_key.split(",")
    if args.api_key_file is not None:
        try:
            text = Path(args.api_key_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {args.api_key_file}: {error}") from None
        lines += [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    keys = tuple(key.strip() for key in lines if key.strip())
    if args.api_key_file is not None and not keys:
        raise UsageError(f"--api-key-file {args.api_key_file} has no key in it")
    return keys


def names_of(args: argparse.Namespace, model: ModelFile) -> tuple[str, ...]:
    """What the model is called, the first of them in replies."""
    names = tuple(name for name in args.alias.split(",") if name)
    return names or ("demo" if args.model == "demo" else model.paths[0].stem,)


def aliases_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The sets of other servers' names that ``/metrics`` shows."""
    names = [name.strip() for name in args.metrics_aliases.split(",") if name.strip()]
    for name in names:
        if name not in METRICS_ALIASES:
            known = ", ".join(METRICS_ALIASES)
            raise UsageError(f"--metrics-aliases {name!r} is not one of {known}")
    return tuple(dict.fromkeys(names))


def limits_of(args: argparse.Namespace) -> Limits:
    from skippy_mesh.gateway.token_stream import Limits

    return Limits(
        queue_timeout_s=args.queue_timeout_s,
        request_timeout_s=args.request_timeout_s,
        stall_timeout_s=args.stream_stall_timeout_s,
        ready_window_s=args.ready_window_s,
        max_body_bytes=args.max_request_bytes,
    )


def _add_log_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level", "-lv", "--uvicorn-log-level", type=level_of, default="info", metavar="LEVEL",
        help=f"on stderr: {', '.join(LEVELS)} (%(default)s: a line for each request)",
    )  # fmt: skip
    parser.add_argument(
        "--log-prompts", action="store_true", help="with that line, what was asked and answered"
    )


def rules_of(args: argparse.Namespace, model: ModelFile) -> ApiRules:
    """:class:`UsageError` if a default is not what a request may have."""
    from skippy_mesh.gateway.parsing import BodyParser
    from skippy_mesh.gateway.rules import ApiRules
    from skippy_mesh.gateway.schemas import CompletionBody

    given = {field: getattr(args, flag) for flag, field in _DEFAULTS.items()}
    defaults = {field: value for field, value in given.items() if value is not None}
    if args.default_max_tokens is not None and args.default_max_tokens < 1:
        raise UsageError(f"--default-max-tokens must be 1 or more, got {args.default_max_tokens}")
    body = BodyParser(defaults=defaults).check(CompletionBody, {"prompt": "x"})
    body.sampling(eog_ids=frozenset(), draw_seed=int)
    return ApiRules(
        aliases=names_of(args, model)[1:],
        tokenizer_id=args.tokenizer_id,
        facts=_facts(model),
        defaults=defaults,
        max_chat_tokens=args.default_max_tokens,
        max_n=args.max_n,
        is_strict_field=args.strict_fields,
        is_strict_model=args.strict_model,
        knows_priority=args.scheduling_policy == "priority",
        chat_template=template_of(args),
        tool_parser=args.tool_parser,
        cors_origins=tuple(origin for origin in args.cors_origins.split(",") if origin),
        root_path=args.root_path,
        guards_metrics=args.metrics_auth,
        logs_prompts=args.log_prompts,
    )


def _facts(model: ModelFile) -> dict[str, object]:
    tensors = model.tensors.values()
    facts: dict[str, object] = {
        "file": model.paths[0].name,
        "n_embd": model.width,
        "n_params": sum(math.prod(tensor.shape) for tensor in tensors),
        "size": sum(tensor.num_bytes for tensor in tensors),
    }
    if _FILE_TYPE in model.metadata:
        facts["ftype"] = model.metadata[_FILE_TYPE].decode()
    return facts
