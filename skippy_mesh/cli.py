"""The command line. Errors are one line on stderr: exit 2 for bad usage, 1 for failure.

Heavy imports (Ray, llama.cpp, the web server) happen inside the commands that need them, so that
``--help`` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import queue
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from skippy_mesh import __version__, logs
from skippy_mesh.arguments import Parser, add_foreign_flags, parse
from skippy_mesh.commands_doctor import add_doctor_flags, run_doctor
from skippy_mesh.commands_plan import add_plan_flags, show_plan
from skippy_mesh.commands_status import add_status_flags, show_status
from skippy_mesh.commands_stop import add_stop_flags, run_stop
from skippy_mesh.config import LOAD_MODES
from skippy_mesh.errors import SkippyError, StageError, UsageError
from skippy_mesh.planning import add_layout_flags, add_model_flag, planned
from skippy_mesh.progress import byte_bar
from skippy_mesh.serving import add_serve_flags, serve_model
from skippy_mesh.sizes import format_size
from skippy_mesh.starting import open_mesh, open_model, profile_text

if TYPE_CHECKING:
    from skippy_mesh.messages import Request, TokenEvent


def build_parser() -> Parser:
    return _build_parser()[0]


def _build_parser() -> tuple[Parser, Mapping[str, Parser]]:
    """With the parser of each command by its name."""
    parser = Parser(
        prog="skippy-mesh",
        description="Serve one GGUF model, split by layers over the machines of a Ray cluster.",
    )
    parser.add_argument("--version", action="version", version=f"skippy_mesh {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="answer the OpenAI API over HTTP")
    _add_model_flags(serve)
    add_serve_flags(serve)
    add_foreign_flags(serve)
    serve.set_defaults(run=run_serve)

    generate = commands.add_parser("generate", help="complete one prompt on stdout")
    _add_model_flags(generate)
    _add_generate_flags(generate)
    generate.set_defaults(run=run_generate)

    plan = commands.add_parser("plan", help="say which node would run which layers")
    add_plan_flags(plan)
    plan.set_defaults(run=run_plan)

    cut = commands.add_parser("slice", help="write some layers of a model as a file of their own")
    add_model_flag(cut, default="")
    cut.add_argument("--layers", metavar="LO:HI", help="layers LO to HI-1")
    cut.add_argument("-o", "--output", metavar="OUT")
    kept = cut.add_mutually_exclusive_group()
    kept.add_argument("--list", action="store_true", help="show the slices that stages cut here")
    kept.add_argument("--prune", action="store_true", help="delete them: they are cut when needed")
    cut.add_argument("--debug", action="store_true", help="show tracebacks")
    cut.set_defaults(run=run_slice)

    status = commands.add_parser("status", help="show how a running server is")
    add_status_flags(status)
    status.set_defaults(run=show_status)

    stop = commands.add_parser("stop", help="end a mesh that runs on a Ray cluster")
    add_stop_flags(stop)
    stop.set_defaults(run=run_stop)

    doctor = commands.add_parser("doctor", help="say whether serve would start, and what to fix")
    add_doctor_flags(doctor)
    doctor.set_defaults(run=run_doctor)
    return parser, commands.choices


def _text(argument: str) -> str:
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not valid UTF-8") from None
    return argument


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    add_layout_flags(parser)
    parser.add_argument(
        "--exact", choices=("auto", "off"), default="auto",
        help="auto: kernels by which company cannot change a request's bytes; off: the fastest",
    )  # fmt: skip
    parser.add_argument(
        "-t", "--threads", type=int, metavar="N", help="per stage (its share of the cores)"
    )
    parser.add_argument(
        "-tb", "--threads-batch", type=int, metavar="N", help=argparse.SUPPRESS
    )  # must be what -t says
    parser.add_argument(
        "-lm", "--load-mode", choices=LOAD_MODES, default="auto", metavar="MODE",
        help=f"how weights are read: {', '.join(LOAD_MODES)} (%(default)s: mmap)",
    )  # fmt: skip
    for flag, mode in (("--mlock", "mlock"), ("--no-mmap", "none")):
        parser.add_argument(
            flag, dest="load_mode", action="store_const", const=mode, help=argparse.SUPPRESS
        )
    parser.add_argument(
        "--address", metavar="RAY", help="Ray cluster to join (RAY_ADDRESS, else one of its own)"
    )
    parser.add_argument(
        "--spread", action="store_true",
        help="each stage on a node of its own, none on the head (default: on as few as they fit)",
    )  # fmt: skip
    parser.add_argument("--use-head", action="store_true", help="--spread may use the head, too")
    parser.add_argument("--mesh-name", default="skippy", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and stage logs")


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-p", "--prompt", required=True, type=_text, metavar="TEXT")
    add("-n", "--max-tokens", type=int, default=64, metavar="N", help="(64)")
    add("--temp", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    add("--top-k", type=int, default=0, metavar="K", help="0 is off (0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 is off (1)")
    add("--min-p", type=float, default=0.0, metavar="P", help="0 is off (0)")
    add("-s", "--seed", type=int, metavar="S", help="default: random")
    add("--json", action="store_true", help="last line: text and token ids")
    parser.set_defaults(prefix_cache=False)  # one prompt has nobody to share with


def run_generate(args: argparse.Namespace) -> int:
    from skippy_mesh.client import EngineClient
    from skippy_mesh.messages import Request, SamplingParams
    from stages.tokenizer import Tokenizer

    seed = secrets.randbits(63) if args.seed is None else args.seed
    sampling = SamplingParams(
        temperature=args.temp, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=seed
    )
    model = open_model(args.model, allow_unproven=args.allow_unproven)
    tokenizer = Tokenizer(str(model.paths[0]))
    prompt = tokenizer.encode(args.prompt, add_special=True, parse_special=True)
    request = Request(
        request_id="generate",
        token_ids=tuple(prompt),
        max_tokens=args.max_tokens,
        sampling=sampling,
        stop_token_ids=tokenizer.eog_ids,
    )
    need_tokens = len(prompt) + args.max_tokens
    with (
        planned(args, model, lanes=1, need_tokens=need_tokens) as plan,
        open_mesh(args, model, plan) as mesh,
        closing(EngineClient(mesh.channel, max_model_len=mesh.max_model_len)) as client,
        _ending_at_interrupt(request) as events,
    ):
        # A token may end inside a character: hold the bytes until it is whole.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces: list[str] = []
        token_ids: list[int] = []
        reason = None
        for event in client.generate(request, events):
            reason = event.finish_reason
            if reason == "error":
                raise StageError(event.error or "the engine failed")
            if event.token_id is not None:
                token_ids.append(event.token_id)
            data = b"" if event.token_id is None else tokenizer.piece(event.token_id)
            pieces.append(decoder.decode(data, final=reason is not None))
            print(pieces[-1], end="", flush=True)
    if reason == "abort":
        raise KeyboardInterrupt
    print()
    if args.json:
        print(
            json.dumps(
                {
                    "text": "".join(pieces),
                    "token_ids": token_ids,
                    "finish_reason": reason,
                    "prompt_tokens": len(prompt),
                    "seed": seed,
                    "cuts": list(plan.cuts),
                    "exact": mesh.why_inexact is None,
                    "why_inexact": mesh.why_inexact,
                    "profile": profile_text(mesh.infos[0].profile),
                }
            )
        )
    return 0


@contextmanager
def _ending_at_interrupt(request: Request) -> Iterator[queue.SimpleQueue[TokenEvent]]:
    """Where Ctrl-C puts the last event of ``request``. Raised, it could come up inside a finaliser,
    where Python forgets it, and the text would go on. The second one is raised."""
    from skippy_mesh.messages import TokenEvent

    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def end(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        events.put(TokenEvent(request_id=request.request_id, finish_reason="abort"))

    before = signal.signal(signal.SIGINT, end)
    try:
        yield events
    finally:
        signal.signal(signal.SIGINT, before)


def run_serve(args: argparse.Namespace) -> int:
    serve_model(args, open_model(args.model, allow_unproven=args.allow_unproven))
    return 0


def run_slice(args: argparse.Namespace) -> int:
    from stages.slices import cut

    if args.list or args.prune:
        return _show_slices(prunes=args.prune)
    if not args.model or args.layers is None or args.output is None:
        raise UsageError("slice takes MODEL --layers LO:HI -o OUT, or --list, or --prune")
    model = open_model(args.model)
    try:
        lo, hi = (int(number) for number in args.layers.split(":"))
    except ValueError:
        raise UsageError(f"--layers takes LO:HI, for example 0:15, got {args.layers!r}") from None
    out = Path(args.output)
    with byte_bar(f"layers {lo}:{hi}") as progress:
        cut(model, lo, hi, out, progress)
    print(f"{out}: layers {lo}:{hi} of {model.num_layers}, {out.stat().st_size:,} bytes")
    return 0


def _show_slices(*, prunes: bool) -> int:
    from stages.slices import kept_slices, prune_slices

    kept = kept_slices()
    for path in kept:
        print(f"{format_size(path.stat().st_size):>8}  {path}")
    if prunes:
        print(f"deleted {len(kept)} slices, {format_size(prune_slices(kept))} freed")
    return 0


def run_plan(args: argparse.Namespace) -> int:
    return show_plan(args, open_model(args.model, allow_unproven=args.allow_unproven))


def main(argv: Sequence[str]) -> int:
    is_debug = "--debug" in argv
    try:
        parsed = parse(*_build_parser(), argv, os.environ)
        args, is_debug = parsed.args, parsed.args.debug
        if is_debug:
            logs.set_up_all()
        else:
            logs.set_up(getattr(args, "log_level", "warning"))
        for notice in parsed.notices:
            print(f"skippy-mesh: {notice}", file=sys.stderr)
        code: int = args.run(args)
        return code
    except SkippyError as error:
        if is_debug:
            raise
        print(f"skippy-mesh: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader has left (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if is_debug:
            raise
        reason = " ".join(str(error).split())
        print(
            f"skippy-mesh: unexpected {type(error).__name__}: {reason} (--debug says where)",
            file=sys.stderr,
        )
        return 1


def entry() -> NoReturn:
    sys.exit(main(sys.argv[1:]))
