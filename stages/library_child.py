"""The child of :mod:`stages.library`: answers with one line of JSON, or dies."""

from __future__ import annotations

import json
import sys

import llama_cpp

from skippy_mesh.config import ContextConfig, specs_of
from skippy_mesh.errors import RuntimeUnavailableError
from stages.gguf_file import ModelFile
from stages.library import features_in
from stages.native import library_dir, load_library, tap_library
from stages.worker import StageWorker


def about() -> dict[str, object]:
    load_library()
    problem = None
    try:
        tap_library()
    except (RuntimeUnavailableError, OSError) as error:
        problem = str(error)
    text = llama_cpp.llama_print_system_info().decode()
    return {
        "folder": str(library_dir()),
        "features": features_in(text),
        "tap_problem": problem,
    }


def stage(path: str, kv_type: str, num_threads: str) -> dict[str, object]:
    model = ModelFile.open(path)
    context = ContextConfig(
        num_cells=256, num_lanes=1, kv_type=kv_type, num_threads=int(num_threads)
    )
    (spec,) = specs_of(path, model.num_layers, (), context)
    info = StageWorker(spec).load()
    return {"why_inexact": info.why_inexact, "load_s": info.load_s}


def main(mode: str, *arguments: str) -> int:
    print(json.dumps(stage(*arguments) if mode == "stage" else about()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
