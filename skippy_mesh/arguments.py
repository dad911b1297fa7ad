"""From what was typed and the environment to the arguments of a command.

``SKIPPY_<FLAG>`` stands for ``--flag`` and is put in front of what was typed, which so wins. Flags
that llama-server and vLLM have and we do not are in tables: those that ask for what is so here
anyway change nothing and are named in one notice, the others are refused with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from skippy_mesh.errors import UsageError

_OURS = "SKIPPY_"
_THEIRS = "LLAMA_ARG_"
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

_NO_EFFECT = (
    "-cb", "--cont-batching", "-kvu", "--kv-unified", "--no-context-shift", "--jinja", "--metrics",
    "--no-webui", "--warmup", "--enable-chunked-prefill", "--enable-auto-tool-choice",
    "--trust-remote-code",
)  # fmt: skip

# Flags, the values that say what is so here, and what to do who wants another.
_AS_IT_IS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("-fa", "--flash-attn"), ("on", "auto", "1"), "attention is exact and quantised with it only"),
    (("-b", "--batch-size", "--max-num-batched-tokens"), ("512",), "a step has at most 512 rows"),
    (("-ub", "--ubatch-size"), ("512",), "a step of at most 512 rows is one micro-batch"),
    (("-ngl", "--gpu-layers", "--n-gpu-layers"), ("0", "auto"), "stages compute on the CPU"),
    (("-tp", "--tensor-parallel-size"), ("1",), "models are cut by layers: --stages K"),
    (("--distributed-executor-backend",), ("ray",), "stages run on Ray"),
)

_REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("-no-kvu", "--no-kv-unified"), "all requests share one pool of cells"),
    (("-nocb", "--no-cont-batching"), "whoever comes joins the next step; --parallel 1 runs alone"),
    (("--context-shift",), "a request ends where its context does, nothing is dropped from it"),
    (("--rpc",), "stages run on the nodes of a Ray cluster: --address"),
    (("-ts", "--tensor-split"), "--cuts says who has which layers"),
    (("-sm", "--split-mode"), "models are cut by layers: --stages K"),
    (("-fitt", "--fit-target"), "--memory-fraction says how much of the free memory to take"),
    (("--override-generation-config",), "defaults are --temp, --top-k, --top-p, --min-p, -n, .."),
    (("--embedding", "--embeddings"), "there is generation only"),
    (("--lora", "--lora-scaled", "--enable-lora", "--lora-modules"), "merge it into the model"),
    (("-mm", "--mmproj"), "there is text only"),
    (
        ("-md", "--model-draft", "--draft", "--draft-max", "--draft-min", "--speculative-config"),
        "there are no draft models",
    ),
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (try {self.prog} --help)")


@dataclass(frozen=True, slots=True)
class Parsed:
    """``notices`` are for stderr, a line each."""

    args: argparse.Namespace
    notices: tuple[str, ...]


def parse(
    parser: Parser,
    commands: Mapping[str, argparse.ArgumentParser],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> Parsed:
    """:class:`UsageError` for what cannot be meant."""
    given = _from_environment(commands, argv, environ)
    at = _command_place(argv) + 1
    tokens = [token for _, token in given]
    try:
        args = parser.parse_args([*argv[:at], *tokens, *argv[at:]])
    except UsageError as error:
        blamed = {name for name, token in given if token.partition("=")[0] in str(error)}
        if not blamed:
            raise
        raise UsageError(f"{error}; in the environment: {', '.join(sorted(blamed))}") from None
    return Parsed(args, (*_foreign(environ), *_settle(args)))


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """What ``serve`` takes of other servers' flags beside the synonyms of its own."""

    def add(flags: Sequence[str], action: type[argparse.Action], **options: Any) -> None:
        parser.add_argument(
            *flags, action=action, dest="ignored", default=argparse.SUPPRESS,
            help=argparse.SUPPRESS, **options,
        )  # fmt: skip

    add(_NO_EFFECT, _Ignored, nargs=0)
    for flags, values, reason in _AS_IT_IS:
        add(flags, _OnlyAs, const=(values, reason))
    for flags, reason in _REFUSED:
        add(flags, _Refused, nargs="?", const=reason)


class _Ignored(argparse.Action):
    def __call__(
        self, _parser: object, namespace: argparse.Namespace, _values: object, option: Any = None
    ) -> None:
        namespace.ignored = (*getattr(namespace, "ignored", ()), option)


class _OnlyAs(_Ignored):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: Any = None
    ) -> None:
        accepted, reason = self.const
        if values not in accepted:
            raise UsageError(f"{option} {values} is not offered, only {accepted[0]}: {reason}")
        super().__call__(parser, namespace, values, f"{option} {values}")


class _Refused(argparse.Action):
    def __call__(
        self, _parser: object, _namespace: object, _values: object, option: Any = None
    ) -> None:
        raise UsageError(f"{option} is not offered: {self.const}")


def _command_place(argv: Sequence[str]) -> int:
    """Where the command's name is; past the end without one."""
    return next((at for at, word in enumerate(argv) if not word.startswith("-")), len(argv))


def _from_environment(
    commands: Mapping[str, argparse.ArgumentParser],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> list[tuple[str, str]]:
    """Variables and the tokens they stand for. Of a flag's spellings the first wins: it is last."""
    at = _command_place(argv)
    if at == len(argv) or argv[at] not in commands:
        return []
    found: list[tuple[str, str]] = []
    for flag, action in reversed(commands[argv[at]]._option_string_actions.items()):
        name = _OURS + flag.removeprefix("--").replace("-", "_").upper()
        is_own = flag.startswith("--") and action.help != argparse.SUPPRESS
        # An empty variable is how a shell or a manifest leaves one out.
        if is_own and action.dest != "help" and (value := environ.get(name)):
            found += [(name, token) for token in _tokens(name, flag, action, value, argv)]
    return found


def _tokens(
    name: str, flag: str, action: argparse.Action, value: str, argv: Sequence[str]
) -> list[str]:
    if action.nargs == 0:
        if value.lower() in _ON:
            return [flag]
        if value.lower() not in _OFF:
            raise UsageError(f"{name} takes 1 or 0, got {value!r}")
        opposite = f"--no-{flag.removeprefix('--')}"
        return [opposite] if opposite in action.option_strings else []
    if isinstance(action.default, list):  # a flag that may be repeated: what is typed replaces it
        if any(word.partition("=")[0] in action.option_strings for word in argv):
            return []
        return [f"{flag}={part}" for part in value.split()]
    return [f"{flag}={value}"]


def _foreign(environ: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in environ if name.startswith(_THEIRS))
    if not names:
        return []
    return [f"warning: not read: {', '.join(names)}; here a flag's variable is {_OURS}<FLAG>"]


def _settle(args: argparse.Namespace) -> list[str]:
    """Take out of ``args`` what no command is to see, and check what no single flag can."""
    facts = vars(args)
    if facts.get("model", "") is None:
        raise UsageError(f"the following arguments are required: MODEL (try {args.command} --help)")
    batch_threads = facts.pop("threads_batch", None)
    if batch_threads is not None and batch_threads != facts["threads"]:
        raise UsageError(
            f"-tb {batch_threads} and -t {facts['threads'] or 'absent'}: prompts and answers are "
            f"computed by the same threads, give -t {batch_threads}"
        )
    types = [facts.pop(name, None) for name in ("cache_type_k", "cache_type_v")]
    asked = {each for each in types if each is not None}
    if len(asked) > 1:
        raise UsageError(f"K and V are kept in one type, got -ctk {types[0]} and -ctv {types[1]}")
    if asked:
        args.kv = asked.pop()
    ignored = facts.pop("ignored", ())
    return [f"no effect here: {', '.join(ignored)}"] if ignored else []
