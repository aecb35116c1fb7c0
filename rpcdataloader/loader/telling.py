"""Why the loop of a pass has waited: one sentence in the log, from rank 0."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable

from rpcdataloader.client.sharing import Partition
from rpcdataloader.diagnosis.records import Recorder
from rpcdataloader.diagnosis.verdict import HARMLESS, URGENT, Diagnosis
from rpcdataloader.wire.messages import printable
from rpcdataloader.wire.status import LoopStatus

logger = logging.getLogger("rpcdataloader.loader")

# Of its own, so that users who silence it still hear of deaths.
diagnosis_logger = logging.getLogger("rpcdataloader.diagnosis")

_failures = itertools.count()  # of diagnoses that were to be logged


def tell(
    recorder: Recorder,
    find: Callable[[], Diagnosis | None],
    dataset: str,
    partition: Partition,
    ask_ranks: Callable[[Callable[[LoopStatus | None], None]], bool] = lambda _then: False,
) -> None:
    """Log, on rank 0 and once, the diagnosis of a pass that waited; an error of ``find`` ends no training.

    All ranks of a training wait for the slowest one: the sentence is that of the rank that waits most, which
    ``ask_ranks`` passes on; it returns False if nothing is known of other ranks.
    """
    if partition.rank or recorder.is_told:
        return
    recorder.is_told = True
    try:
        if (diagnosis := find()) is not None:
            say = functools.partial(_say, f"{partition.label}{dataset}, {recorder.batches:,} batches: ", diagnosis)
            if partition.world_size == 1 or not ask_ranks(say):
                say(None)
    except Exception:
        level = logging.DEBUG if next(_failures) else logging.WARNING
        logger.log(level, "cannot say why the loop has waited; training goes on", exc_info=True)


def _say(prefix: str, own: Diagnosis, slowest: LoopStatus | None) -> None:
    is_urgent, text = own.is_urgent, own.text if own.bound != "none" else ""
    if slowest is not None and slowest.wait_share >= own.wait_share + HARMLESS and slowest.bound != "unclear":
        is_urgent, text = slowest.wait_share >= URGENT, printable(slowest.text)
        prefix += f"rank {slowest.rank} waits most ({100 * slowest.wait_share:.0f} %): "
    if text:
        diagnosis_logger.log(logging.WARNING if is_urgent else logging.INFO, "%s%s", prefix, text)
