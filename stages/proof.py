"""Whether a stage may call itself exact, and if not, why; found out beside the rest of loading.

Loading waits for a disk that reads the file, and for one that writes the slice. So a thread of its
own digests the file, for the name under which the verdict is kept, and then runs the self-test,
which needs a few layers of the model only. Not both at once: the test wants every processor, and
takes several times as long where it has to share one.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from skippy_mesh.config import EXACT_KV_TYPES
from stages import selftest
from stages.native import load_library
from stages.part import Part
from stages.probe import machine_key
from stages.profile import matrix_types
from stages.selftest import Verdict
from stages.views import GetWeights, views_of
from stages.weights import Weights


def why_unprovable(part: Part) -> str | None:
    """Why no test could show that this stage is exact."""
    family, config = part.model.family, part.spec.context
    if not config.exact:
        return "switched off (--exact off)"
    if not family.is_proven:
        return f"nothing is proven of architecture {part.model.architecture} (--allow-unproven)"
    if config.kv_type not in EXACT_KV_TYPES:
        return f"with {config.kv_type} KV, attention rounds by the shape of a step"
    return None


class Proof:
    """Of one stage, begun with the block; :meth:`lend` it the weights as soon as they are loaded.
    When the block ends, nothing of it runs any more."""

    def __init__(self, part: Part):
        self._part = part
        self._weights: Future[Weights] = Future()
        self._verdict: Future[str | None] = Future()
        self._pool = ThreadPoolExecutor(1, "proof")

    def __enter__(self) -> Proof:
        reason = why_unprovable(self._part)
        if reason is None:
            load_library()
            self._verdict = self._pool.submit(_why_inexact, self._part, self._weights.result)
        else:
            self._verdict.set_result(reason)
        return self

    def lend(self, weights: Weights) -> None:
        self._weights.set_result(weights)

    def why_inexact(self) -> str | None:
        """None if company does not change a row's bits. Waits for the test."""
        return self._verdict.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._weights.cancel()  # they will not come
        self._pool.shutdown()


def _why_inexact(part: Part, weights: GetWeights) -> str | None:
    model, config = part.model, part.spec.context
    key = _key(part)
    verdict = selftest.recall(key)
    if verdict is None:
        is_recurrent = model.family.is_recurrent
        views = views_of(part, weights)
        verdict = Verdict(selftest.failure_of_views(views, config, is_recurrent=is_recurrent))
        selftest.keep(key, verdict)
    if verdict.failure is None:
        return None
    types = ", ".join(sorted(matrix_types(model.tensors.values())))
    return f"the self-test failed: {verdict.failure}; weights are {types}, {part.profile}"


def _key(part: Part) -> tuple[str, ...]:
    """What a verdict holds for. Once per machine this reads the whole file, for its digest."""
    spec, config = part.spec, part.spec.context
    return (
        part.model.digest, f"{spec.first_layer}:{spec.end_layer}", machine_key(),
        config.kv_type, str(config.num_threads), repr(part.profile),
    )  # fmt: skip
