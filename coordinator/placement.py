"""What to say while the cluster has no room for the stages: every bundle that is not met, and what
each node has. Pure; :mod:`coordinator.launch` asks Ray and waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Resources = Mapping[str, float]
_SHOWN = ("CPU", "GPU")


def why_unplaced(
    bundles: Sequence[Resources], nodes: Sequence[tuple[str, Resources]], *, spread: bool
) -> str:
    """Why ``bundles`` do not go on ``nodes``, each a name and what is free there. With ``spread``
    every bundle needs a node of its own."""
    free = {index: dict(resources) for index, (_, resources) in enumerate(nodes)}
    unmet: list[int] = []
    # The largest first, where most is free: what is left over then does not fit at all.
    for stage in sorted(range(len(bundles)), key=lambda stage: -bundles[stage]["CPU"]):
        bundle = bundles[stage]
        roomy = [index for index, has in free.items() if _holds(has, bundle)]
        if not roomy:
            unmet.append(stage)
            continue
        node = max(roomy, key=lambda index: free[index].get("CPU", 0.0))
        if spread:
            del free[node]
        else:
            free[node] = {name: have - bundle.get(name, 0.0) for name, have in free[node].items()}
    lacking = ", ".join(f"stage {stage} ({_text(bundles[stage])})" for stage in sorted(unmet))
    rule = ", each on a node of its own" if spread else ""
    have = "; ".join(f"{name} has {_text(resources)} free" for name, resources in nodes)
    return f"no room for {lacking or 'all stages at once'}{rule}: {have or 'there is no node'}"


def _holds(free: Resources, bundle: Resources) -> bool:
    return all(free.get(name, 0.0) >= amount for name, amount in bundle.items())


def _text(resources: Resources) -> str:
    amounts = {"CPU": 0.0, **resources}
    return ", ".join(f"{amounts[name]:g} {name}" for name in _SHOWN if name in amounts)
