"""A gateway in this process, in front of one real stage."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import uvicorn

from coordinator.launch import mesh
from skippy_mesh.client import EngineClient
from skippy_mesh.config import ContextConfig, EngineSettings, specs_of
from skippy_mesh.gateway.app import create_app
from stages.grammar_compiler import GrammarCompiler
from stages.tokenizer import Tokenizer
from tests.crowd import Made
from tests.engines import BOUNDS, places_of

CONTEXT = ContextConfig(num_cells=4096, num_lanes=16, num_residents=8, max_rows=256, num_threads=1)


@contextmanager
def served(model: Made, **options: Any) -> Iterator[str]:
    """Its URL. ``options`` are those of :func:`create_app`."""
    specs = specs_of(model.path, model.model.num_layers, (), CONTEXT)
    with (
        mesh(specs, EngineSettings(running=16)) as running,
        closing(EngineClient(running.channel, max_model_len=1024)) as client,
        closing(GrammarCompiler(str(model.path))) as grammars,
    ):
        settings = {
            "model_name": "tiny", "health": lambda: None, "places": places_of(), "bounds": BOUNDS,
            **options,
        }  # fmt: skip
        app = create_app(client, Tokenizer(str(model.path)), grammars, **settings)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
