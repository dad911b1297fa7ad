"""One point has vLLM's keys and block, from a server that tells much and from one that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.run import main
from skippy_mesh.errors import RuntimeUnavailableError, UsageError
from tests.bench_engines import PlantedEngine, up

VLLM_KEYS = {
    "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p90", "p95", "p99")
      for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
OUR_KEYS = {
    "sent", "rejected", "aborted", "timeouts", "config_hash", "model_digest", "exact", "slo",
    "attainment", "attainment_ttft", "attainment_tpot", "attainment_e2el", "workload", "arrival",
    "engine", "hardware", "commit", "peak_memory_bytes", "kv_bytes_per_session", "preemptions",
    "recomputed_tokens", "recompute_tax", "cached_tokens", "prefix_hit_rate", "max_itl_ms",
    "parity",
}  # fmt: skip
DETAILS = {
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
    "errors",
}  # fmt: skip
FLAGS = ["--workload", "short-short-unique", "--num-prompts", "6"]


def document_of(tmp_path: Path, *flags: str) -> dict[str, Any]:
    out = tmp_path / "point.json"
    with up(PlantedEngine(service_s=0.01)) as url:
        assert main(["--url", url, *FLAGS, "--out", str(out), *flags]) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def test_a_closed_point_has_every_key_of_the_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document_of(tmp_path, "--clients", "2", "--detailed")
    assert not (VLLM_KEYS | OUR_KEYS | DETAILS) - found.keys()
    assert (found["arrival"], found["request_rate"], found["max_concurrency"]) == (
        "closed", "inf", 2
    )  # fmt: skip
    assert found["completed"] == 6 == len(found["ttfts"])
    assert found["exact"] is None, "this server has no /status"
    assert "Serving Benchmark Result" in capsys.readouterr().out


def test_an_open_point_says_its_rate_and_its_probes(tmp_path: Path) -> None:
    found = document_of(
        tmp_path, "--rate", "20", "--burstiness", "inf", "--max-concurrency", "1",
        "--probe-rate", "20", "--slo", "ttft:5000,e2el:5000",
    )  # fmt: skip
    assert (found["arrival"], found["request_rate"], found["burstiness"]) == ("open", 20.0, "inf")
    assert found["max_concurrent_requests"] == 1
    assert found["probe_completed"] >= 1 and found["probe_failed"] == 0
    assert found["slo"] == {"ttft": 5000.0, "e2el": 5000.0} and found["attainment"] == 1.0


def test_a_cap_without_a_rate_and_a_dead_server_are_told() -> None:
    with up(PlantedEngine(service_s=0.0)) as url, pytest.raises(UsageError, match="--clients"):
        main(["--url", url, "--max-concurrency", "3"])
    with pytest.raises(RuntimeUnavailableError, match="no answer from"):
        main(["--url", url])
    with pytest.raises(UsageError, match="only talks to this machine"):
        main(["--url", "http://example.org"])
