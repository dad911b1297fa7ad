"""What the gate measures, for which models, and by what margins it judges. Pure data."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.workloads import Workload, mixes
from skippy_mesh.families import gate_families

CLASSES = tuple(family.name for family in gate_families())
RECURRENT = tuple(family.name for family in gate_families() if family.is_recurrent)
LEVELS = (1, 2, 4, 8, 16, 32, 64)
CROWD = 32  # clients at which the mesh has to win


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """By how much. Ratios are ours over theirs; ``slack`` is what noise may take from "no
    worse"."""

    crowd: int = CROWD  # clients
    crowd_throughput: float = 2.0
    crowd_p99: float = 1.0
    slack: float = 0.05
    prefix_ttft: float = 0.5  # warm over cold
    prefix_hit_rate: float = 0.5  # below it the row did not do what it is for
    request_s: float = 0.02  # of a request between actors, at any size of a model
    flat_memory: float = 1.1  # second half of an overload over the first
    void_attainment: float = 0.1  # goodput means nothing where both arms attain less


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model. ``model`` is a file, ``demo``, or empty for the class's fixture."""

    name: str
    family: str
    model: str = ""
    levels: tuple[int, ...] = LEVELS
    is_whole: bool = True  # else the curve only, without the rows of long prompts and overload

    @property
    def is_recurrent(self) -> bool:
        return self.family in RECURRENT

    def num_prefix_rows(self, rounds: int) -> int:
        """Where nothing is owed, one shows what there is."""
        return self.is_whole * (1 if self.is_recurrent else rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    mode: str
    rounds: int
    point_seconds: float  # nothing is sent after this
    requests_per_client: int  # nor after so many, whichever comes first
    overload_seconds: float
    mixes: tuple[str, ...]
    num_alone: int  # answers that must be the same alone, in a crowd and from the old engine
    exact_clients: int = 16  # of that crowd
    min_requests: int = 8  # of a point; below this a median says little
    lone_requests: int = 12  # of a point with one client, whose median first token is judged
    max_queue: int = 64  # of the mesh: with 32 lanes, 64 clients are all let in and 128 are not
    long_tokens: int = 2000
    prefix_tokens: int = 512
    prefix_clients: int = 8
    drain_seconds: float = 300.0  # for what is open when a point's time is up
    stages: int = 2
    threads: int | None = None
    seed: int = 1
    margins: Margins = field(default_factory=Margins)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "mixes": list(self.mixes)}

    def num_requests(self, level: int) -> int:
        if level == 1:
            return self.lone_requests
        return max(self.min_requests, self.requests_per_client * level)

    @property
    def num_cells(self) -> int:
        """Room for 32 whole sessions of the longest mix, and for one long prompt."""
        longest = max(mixes()[name].max_tokens for name in self.mixes)
        prefixed = self.prefix_tokens + 64
        return -(-max(8192, CROWD * longest, self.prefix_clients * prefixed) // 256) * 256

    def workload(self, mix: str, name: str, words_per_token: float) -> Workload:
        return replace(
            mixes()[mix], seed=f"{self.seed}/{mix}/{name}", words_per_token=words_per_token
        )

    def long_prompt(self, name: str, words_per_token: float) -> Workload:
        """One answer behind a long prompt: what is asked is the time to its first token."""
        return Workload(
            prompt_tokens=self.long_tokens,
            output_tokens=4,
            words_per_token=words_per_token,
            seed=f"{self.seed}/long/{name}",
        )

    def shared_prompt(self, name: str, words_per_token: float, *, uses_cache: bool) -> Workload:
        return Workload(
            prompt_tokens=self.prefix_tokens + 32,
            shared_tokens=self.prefix_tokens,
            output_tokens=16,
            uses_cache=uses_cache,
            words_per_token=words_per_token,
            seed=f"{self.seed}/prefix/{name}",
        )


QUICK = Settings(
    mode="quick",
    rounds=3,
    point_seconds=10.0,
    requests_per_client=2,
    overload_seconds=10.0,
    mixes=("short-short-unique",),
    num_alone=8,
)
FULL = replace(
    QUICK,
    mode="full",
    rounds=5,
    point_seconds=60.0,
    requests_per_client=5,
    overload_seconds=60.0,
    mixes=tuple(mixes()),
    num_alone=32,
)


def default_cases(classes: tuple[str, ...], models: dict[str, str]) -> list[Case]:
    """The class's fixture or the model given for it; and SmolLM2, real weights, for dense."""
    cases = []
    for family in classes:
        model = models.get(family, "")
        name = family if not model else f"{family}/{Path(model).stem}"
        cases.append(Case(name=name, family=family, model=model))
        if family == "dense" and not model:
            cases.append(
                Case(name="dense/demo", family=family, model="demo", levels=(1, CROWD),
                     is_whole=False)
            )  # fmt: skip
    return cases


def num_threads(settings: Settings) -> int:
    """Of each stage: its share of the cores."""
    return settings.threads or max(1, (os.cpu_count() or 1) // settings.stages)
