"""What node servers are told of a training loop: its diagnosis, in few bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rpcdataloader.diagnosis.verdict import Diagnosis
from rpcdataloader.wire.status import LoopStatus, Value


def to_status(diagnosis: Diagnosis, dataset: str, rank: int | None) -> LoopStatus:
    """A diagnosis as a report; ``dataset`` is the name of a class."""
    evidence = diagnosis.evidence
    delivered = evidence.get("delivered_rate", 0.0)
    return LoopStatus(
        dataset=dataset[:80],
        rank=rank,
        wait_share=_round(diagnosis.wait_share),
        bound=diagnosis.bound,
        text=diagnosis.text[:500],
        demand_per_second=None if math.isinf(diagnosis.demand) else _round(diagnosis.demand),
        delivered_per_second=_round(delivered) if isinstance(delivered, float) else 0.0,
        more_workers=None if diagnosis.more_workers is None else diagnosis.more_workers[1],
        evidence=_values({name: value for name, value in evidence.items() if isinstance(value, float)}),
        stages=_values({name: stage.mean for name, stage in diagnosis.stages.items()}),
    )


def _values(numbers: Mapping[str, float]) -> list[Value]:
    return [Value(name, _round(number)) for name, number in numbers.items() if math.isfinite(number)]


def _round(number: float) -> float:
    return float(f"{number:.4g}")
