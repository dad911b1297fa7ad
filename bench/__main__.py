"""``python -m bench COMMAND ...``: each command is a module with ``main(argv) -> exit code``."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys

from skippy_mesh.errors import SkippyError

COMMANDS = {
    "stage": "one stage's cost per step, without a server",
    "gap": "the longest pause in answers beside long prompts",
    "lag": "how soon a sampled token reaches its client",
    "sweep": "throughput, latency and memory against the number of clients",
    "run": "one point, with the keys and the block of vLLM's bench",
    "serve": "ours against llama-server and llama.cpp RPC, in paired rounds, with targets",
    "prefix": "what a shared system prompt saves, against computing it and against llama-server",
    "gate": "the mesh against the single-lane engine, class by class; decides --engine auto",
    "report": "the gate's results as pictures, a page and the README's table",
    "peers": "ours beside every server of its kind, and below the roofline",
}


def main(argv: list[str]) -> int:
    listing = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Honest numbers.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="see `python -m bench COMMAND -h`")
    args = parser.parse_args(argv)
    # A terminated bench must still end the servers it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        # Imported when asked for: one command must not need what another one does.
        code: int = importlib.import_module(f"bench.{args.command}").main(args.rest)
    except SkippyError as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return problem.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
