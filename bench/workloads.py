"""What requests ask for: lengths, and how much of a prompt others have, too. Pure and seeded.

A :class:`Workload` makes the request of any index, the same for whichever server. The named ones
are lengths (``chat``, ``rag``, ``generate``, ``long``, and ``short`` or ``long`` on either side for
the mixes) and shapes (``unique``, ``shared``, ``groups``, ``turns``).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from skippy_mesh.errors import UsageError

# Everyday words: nearly every vocabulary has each as one token with its leading space.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education"
)
WORDS = _WORDS.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every request asks for. Same seed and index, same prompt, for whichever engine.

    Lengths are in tokens, as far as ``words_per_token`` is right for the model; what the server
    counted is in the records. Of ``prompt_tokens`` the first ``shared_tokens`` are those of the
    request's group. With ``num_turns`` above 1 requests are turns of chats, ``prompt_tokens`` each:
    a later turn repeats the ones before it. What the assistant is said to have answered is written
    here, so that a prompt does not depend on when an earlier answer came.
    """

    prompt_tokens: int = 128
    output_tokens: int = 64  # exact: end-of-text is masked, so all engines do equal work
    shared_tokens: int = 0
    num_groups: int = 1
    num_turns: int = 1
    uses_cache: bool = False
    words_per_token: float = 1.0
    seed: str = "0"
    # Fields that a server needs beside.
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)
    has_usage: bool = True  # False for a server that does not count what it streams

    def prompt(self, index: int) -> str:
        """Random words, so that no two prompts share a prefix that a cache could skip, but for the
        one they are meant to share."""
        group = index % self.num_groups
        shared = self._words(f"shared/{group}" if group else "shared", self.shared_tokens)
        own = self.prompt_tokens - self.shared_tokens
        if self.num_turns == 1:
            return " ".join(shared + self._words(str(index), own))
        chat, turn = self.place_of(index)
        turns = [self._words(f"{chat}/{number}", own) for number in range(turn + 1)]
        return " ".join([*shared, *itertools.chain(*turns)])

    def place_of(self, index: int) -> tuple[int, int]:
        """Chat and turn. Eight chats take turns, so that a turn seldom comes before the one it
        goes on from was answered."""
        block, within = divmod(index, _CHATS_AT_ONCE * self.num_turns)
        turn, chat = divmod(within, _CHATS_AT_ONCE)
        return block * _CHATS_AT_ONCE + chat, turn

    def _words(self, name: str, num_tokens: int) -> list[str]:
        count = round(num_tokens * self.words_per_token)
        if num_tokens:
            count = max(count, 1)
        return random.Random(f"{self.seed}/{name}").choices(WORDS, k=count)

    def body(self, index: int) -> dict[str, object]:
        return {
            "prompt": self.prompt(index),
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": self.uses_cache,
            **self.extra,
        }

    @property
    def max_tokens(self) -> int:
        """Of the longest request, prompt and answer; a tenth more, as lengths are wished for."""
        longest = self.shared_tokens + self.num_turns * (self.prompt_tokens - self.shared_tokens)
        return -(-longest * 11 // 10) + self.output_tokens


_CHATS_AT_ONCE = 8

# (prompt, output) tokens. The first four at full size; the mixes' are ones that tiny models hold.
LENGTHS: Mapping[str, tuple[int, int]] = {
    "chat": (256, 128),
    "rag": (2048, 128),
    "generate": (256, 1024),
    "long": (2048, 1024),
}
_SIDES = {"short": (32, 24), "long": (512, 96)}
SHAPES: Mapping[str, Mapping[str, int]] = {
    "unique": {},
    "shared": {"shared_tokens": 1024},
    "groups": {"shared_tokens": 256, "num_groups": 8},
    "turns": {"num_turns": 4},
}
_MIX_SHARED_TOKENS = 128


def mixes() -> dict[str, Workload]:
    """The eight: prompt length, output length, and whether prompts begin alike."""
    found = {}
    for prompt, output, prefix in itertools.product(_SIDES, _SIDES, ("unique", "shared")):
        shared = _MIX_SHARED_TOKENS if prefix == "shared" else 0
        found[f"{prompt}-{output}-{prefix}"] = Workload(
            prompt_tokens=_SIDES[prompt][0] + shared,
            output_tokens=_SIDES[output][1],
            shared_tokens=shared,
            uses_cache=bool(shared),
        )
    return found


def named(lengths: str, shape: str = "unique", *, scale: float = 1.0, seed: str = "0") -> Workload:
    """A workload by its names. What a shape shares comes on top of the prompt's own length, and
    ``scale`` shrinks all of it."""
    if lengths in (found := mixes()):
        if shape != "unique":
            raise UsageError(f"{lengths} says itself what prompts share: leave --shape out")
        workload = found[lengths]
    elif lengths in LENGTHS and shape in SHAPES:
        prompt, output = LENGTHS[lengths]
        shared = SHAPES[shape].get("shared_tokens", 0)
        workload = Workload(
            prompt_tokens=prompt + shared,
            output_tokens=output,
            shared_tokens=shared,
            num_groups=SHAPES[shape].get("num_groups", 1),
            num_turns=SHAPES[shape].get("num_turns", 1),
            uses_cache=shape != "unique",
        )
    else:
        raise UsageError(
            f"no workload {lengths!r} of shape {shape!r}: lengths are "
            f"{', '.join((*LENGTHS, *found))}; shapes {', '.join(SHAPES)}"
        )
    return scaled(replace(workload, seed=seed), scale)


def scaled(workload: Workload, scale: float) -> Workload:
    if scale <= 0:
        raise UsageError(f"--scale must be above 0, got {scale:g}")
    shared = round(workload.shared_tokens * scale)
    own = max(1, round((workload.prompt_tokens - workload.shared_tokens) * scale))
    return replace(
        workload,
        prompt_tokens=shared + own,
        shared_tokens=shared,
        output_tokens=max(1, round(workload.output_tokens * scale)),
    )
