"""The bare loop really runs: a wrong step would be refused by the stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.pairs import wants_of_llama_cpp_python
from bench.roofline import Work, of_our_runtime
from stages.tokenizer import Tokenizer
from tests.crowd import Made


@pytest.mark.parametrize("family", ["dense", "ssm"])
def test_our_runtime_does_the_work_of_some_sessions(
    family: str, made: Callable[..., Made], shared_cache: object
) -> None:
    work = Work(num_sessions=3, prompt_tokens=20, output_tokens=4, num_cells=512, num_threads=1)
    point = of_our_runtime(made(family, "q8_0").path, work)
    assert point["prefill_s"] > 0 and point["decode_s"] > 0
    assert point["output_throughput"] == pytest.approx(
        3 * 4 / (point["prefill_s"] + point["decode_s"])
    )


def test_a_server_without_ignore_eos_is_kept_from_ending(made: Callable[..., Made]) -> None:
    path = made("dense", "q8_0").path
    wants = wants_of_llama_cpp_python(path)
    ends = Tokenizer(str(path)).eog_ids
    assert ends and wants["extra"]["logit_bias"] == {str(token): -100 for token in ends}
