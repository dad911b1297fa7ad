"""The block a benchmark prints, with the row labels of vLLM's bench: scripts look for them."""

from __future__ import annotations

from collections.abc import Mapping

WIDTH = 50
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_ROWS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)
_OURS = (
    ("Rejected requests:", "rejected"),
    ("Timed out requests:", "timeouts"),
    ("SLO attainment over sent:", "attainment"),
    ("Prefix hit rate:", "prefix_hit_rate"),
    ("Recomputed tokens:", "recomputed_tokens"),
    ("KV bytes per session:", "kv_bytes_per_session"),
    ("Longest stall (ms):", "max_itl_ms"),
    ("Client CPU (cores):", "client_cpu_share"),
)


def block(document: Mapping[str, object]) -> str:
    """What is not known has no row."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_table(_ROWS, document)]
    for name, title in _TITLES.items():
        rows = [("Mean", "mean"), ("Median", "median"), ("P90", "p90"), ("P99", "p99")]
        found = _table(
            [(f"{label} {name.upper()} (ms):", f"{key}_{name}_ms") for label, key in rows], document
        )
        lines += [f"{title:-^{WIDTH}}", *found] if found else []
    lines += [f"{'Beyond vLLM':-^{WIDTH}}", *_table(_OURS, document)]
    failures = document.get("failures")
    if isinstance(failures, Mapping):
        lines += [f"{f'Failed with {code}:':<40} {count:<10}" for code, count in failures.items()]
    return "\n".join([*lines, "=" * WIDTH])


def _table(
    rows: tuple[tuple[str, str], ...] | list[tuple[str, str]], document: Mapping[str, object]
) -> list[str]:
    found = []
    for label, key in rows:
        value = document.get(key)
        if isinstance(value, float):
            found.append(f"{label:<40} {value:<10.2f}")
        elif value is not None:
            found.append(f"{label:<40} {value!s:<10}")
    return found
