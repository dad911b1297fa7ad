"""Make models to try things with: ``python -m tests.models OUT_DIR``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.models import FAMILIES, make_model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models",
        description="Write small models with random weights, one GGUF file per family.",
    )
    families = [f"{family} ({architecture})" for family, architecture in FAMILIES.items()]
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="made if it does not exist")
    parser.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY",
        default=list(FAMILIES),
        help=f"{', '.join(families)}: either name; default: all",
    )
    parser.add_argument("--size", choices=("tiny", "bench"), default="tiny")
    parser.add_argument("--dtype", default="f32", help="f32, f16, q8_0, q4_K_M, ..; default: f32")
    parser.add_argument("--seed", type=int, default=0)
    # Families may follow the options, which plain parsing does not allow for a list of them.
    options = parser.parse_intermixed_args(arguments)
    try:
        options.out_dir.mkdir(parents=True, exist_ok=True)
        for family in options.families:
            _make(family, options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _make(family: str, options: argparse.Namespace) -> None:
    started = time.monotonic()
    architecture = FAMILIES.get(family, family)
    name = f"{architecture}-{options.size}-{options.dtype}.gguf"
    path = make_model(
        family,
        options.out_dir / name,
        dtype=options.dtype,
        size=options.size,
        seed=options.seed,
    )
    megabytes = path.stat().st_size / 1e6
    print(f"{path}: {megabytes:.1f} MB in {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
