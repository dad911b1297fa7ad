"""The two servers a gate compares: the mesh and the single-lane engine, on the same model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.gate.settings import CROWD, Case, Settings, num_threads
from bench.machine import model_facts
from bench.server_side import Prices, prices_of, status_of
from bench.servers import Server, mesh_command, running
from bench.workloads import WORDS
from skippy_mesh.starting import demo_path

OURS, THEIRS = "ours", "theirs"
ENGINES = {OURS: "mesh", THEIRS: "baseline"}
READY_S = 300.0
_MAX_WAITING = 4 * CROWD  # the old engine has one lane, and all but one client wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A server that is up. ``prices`` are its bytes of a cell by component and stage;
    ``ceiling`` how many requests it says may run at once."""

    server: Server
    prices: Prices
    ceiling: int

    @property
    def url(self) -> str:
        return self.server.url


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """``model`` says which file both serve."""

    ours: Arm
    theirs: Arm
    words_per_token: float
    model: Mapping[str, object]

    def by_label(self) -> dict[str, Arm]:
        return {OURS: self.ours, THEIRS: self.theirs}


def model_of(case: Case, folder: Path) -> Path:
    """The file of a case; fixtures are made on the spot, the same bytes each time."""
    if case.model == "demo":
        return demo_path()
    if case.model:
        return Path(case.model)
    from tests.models import make_model

    made: Path = make_model(case.family, folder / f"{case.family}.gguf", dtype="q8_0", size="bench")
    return made


def command_of(label: str, model: Path, settings: Settings) -> list[str]:
    waiting = settings.max_queue if label == OURS else _MAX_WAITING
    command = mesh_command(
        str(model),
        stages=settings.stages,
        engine=ENGINES[label],
        num_cells=settings.num_cells,
        num_threads=num_threads(settings),
    )
    return [*command, "--max-queue", str(waiting)]


@contextlib.contextmanager
def started(case: Case, settings: Settings) -> Iterator[Arms]:
    """Both at once: only one of them is asked at a time, and so a round's two runs are seconds
    apart and drift cannot favour either. An idle server waits."""
    from skippy_mesh.planning import costs_of_model
    from skippy_mesh.starting import open_model

    arms = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gate-"))
        model = model_of(case, Path(folder))
        layers = costs_of_model(open_model(str(model)), "q8_0").layers
        for label, engine in ENGINES.items():
            server = stack.enter_context(
                running(engine, command_of(label, model, settings), ready_s=READY_S)
            )
            status = status_of(server.url)
            borders = [(stage["layers"][0], stage["layers"][1]) for stage in status["stages"]]
            arms[label] = Arm(
                server=server,
                prices=prices_of(layers, borders),
                ceiling=int(status["ceiling"]["value"]),
            )
        yield Arms(
            ours=arms[OURS],
            theirs=arms[THEIRS],
            words_per_token=words_per_token(arms[OURS].url),
            model=model_facts(model),
        )


def words_per_token(url: str) -> float:
    """Of the bench's words, by the model's own tokenizer."""
    reply = httpx.post(
        f"{url}/tokenize", json={"content": " ".join(WORDS)}, timeout=30, trust_env=False
    )
    reply.raise_for_status()
    return float(len(WORDS) / reply.json()["count"])
