"""Every error a user can meet. Each carries the numbers and the way out in one line.

::

    SkippyError                   exit 1, one line on stderr
    ├── UsageError                exit 2: the command line asks for something impossible
    ├── PlanError                 the nodes cannot hold the model; what each lacks
    ├── ModelFileError            the file is missing, truncated, not a GGUF, or cannot be sliced
    │   ├── UnsupportedModelError no proven way to cut this architecture
    │   └── NoSpaceError          the disk cannot hold the slice
    ├── RuntimeUnavailableError   llama.cpp or Ray does not work on this machine
    ├── RequestError              HTTP 400 or exit 2: it can never be served as it is
    ├── CoordinatorLostError      HTTP 503: nobody can say who may come in; running ones go on
    ├── IdsExhaustedError         every sequence id is taken; the scheduler never gets here
    └── StageError                one step failed on one stage
        ├── InvalidBatchError     refused before the library saw it; nothing changed
        ├── NoRoomError           no free cells; nothing changed, the caller may free and retry
        ├── StepOrderError        a gap, a repeat or a stale epoch; nothing changed
        ├── StageLostError        a stage is gone, with all it held
        └── DecodeError           the library failed midway; the lanes it names were dropped
"""

from __future__ import annotations

from collections.abc import Mapping


class SkippyError(Exception):
    """Base of all errors with a message meant for people."""

    exit_code = 1


class UsageError(SkippyError):
    exit_code = 2


class PlanError(SkippyError):
    """No plan. ``shortfalls`` are the bytes that each node by itself would have to gain for one."""

    def __init__(self, message: str, shortfalls: Mapping[str, int]):
        super().__init__(message)
        self.shortfalls = dict(shortfalls)


class ModelFileError(SkippyError):
    pass


class UnsupportedModelError(ModelFileError):
    pass


class NoSpaceError(ModelFileError):
    pass


class RuntimeUnavailableError(SkippyError):
    pass


class RequestError(SkippyError):
    """A request that cannot be served as it stands.

    ``param`` names the offending field, ``code`` is the machine-readable reason of the HTTP
    error body.
    """

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


class CoordinatorLostError(SkippyError):
    pass


class IdsExhaustedError(SkippyError):
    pass


class StageError(SkippyError):
    pass


class InvalidBatchError(StageError):
    pass


class NoRoomError(StageError):
    pass


class StepOrderError(StageError):
    pass


class StageLostError(StageError):
    """``stage`` may come back, empty."""

    def __init__(self, message: str, stage: int):
        super().__init__(message, stage)
        self.stage = stage

    def __str__(self) -> str:
        return str(self.args[0])


class StageChangedError(StageLostError):
    """``stage`` is there again with other memory than before: its engine's plans hold no more."""


class DecodeError(StageError):
    """``lanes`` lost their memory on this stage and must be recomputed everywhere."""

    def __init__(self, message: str, lanes: tuple[int, ...] = ()):
        super().__init__(message, lanes)
        self.lanes = lanes

    def __str__(self) -> str:
        return str(self.args[0])
