"""All texts of a diagnosis. Pure.

Values are formatted by the end of their names: ``_share``, ``_seconds``, ``_bytes``, ``_rate`` (batches per second).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Value = float | str

# The sentence of each bound, with the names of values in braces; docs/waiting.md says when each is the bound.
WORDS = {
    "none": "The loop waits {wait_share} of its time for batches, which leaves nothing to gain.",
    "start": "The loop waited {first_wait_seconds} for its first batch, and {wait_share} of its time since: {advice}.",
    "workers": "The loop waits {wait_share} of its time for workers, which spend it in {stage}: {remedy}.",
    "collate": "The loop waits {wait_share} of its time for workers, which spend {collate_share} of theirs in "
    "collate_fn: make it cheaper, or {remedy}.",
    "storage": "The loop waits {wait_share} of its time for workers, which wait {stalled_share} of theirs for storage: "
    "if that can give more, {remedy}.",
    "oversubscribed": "The loop waits {wait_share} of its time for workers, which wait {runqueue_share} of theirs for "
    "a CPU: give them more CPUs or nodes, as more workers on the same CPUs would not help.",
    "node": "The loop waits {wait_share} of its time for node {node}, whose workers take {slow_factor:.1f} times as "
    "long as the others: look at its load and storage, or leave it out.",
    "network": "The loop waits {wait_share} of its time for the network, which carries {network_rate} batches per "
    "second ({link_bytes}/s) of {demand_rate}: send less than {batch_bytes} per batch (uint8 in place of float32, "
    "crops, compressed data), or use a faster link.",
    "trainer": "The loop waits {wait_share} of its time for its own process, {reason}.",
    "device_copy": "The loop waits {wait_share} of its time for copies to the device, which take {copy_seconds} per "
    "batch of {batch_bytes}: send smaller types (uint8 in place of float32), and convert them on the device.",
    "sampler": "The loop waits {wait_share} of its time for the sampler, which takes {draw_seconds} per batch: make it "
    "cheaper, or draw the indices in advance.",
    "window": "The loop waits {wait_share} of its time for batches that were asked for too late: each takes "
    "{latency_seconds}, {allowed:.0f} may be in flight, and {in_flight:.0f} are needed: set {setting} (now {current}).",
    "straggler": "The loop waits {wait_share} of its time for single batches while later ones are here, {worst_share} "
    "of it for {worker}: look at that worker, or hide it with a larger prefetch_factor or in_order=False.",
    "unclear": "The loop waits {wait_share} of its time, and what is known of {batches} does not say why{seen}.",
}

# A pass that has begun and delivered nothing.
NOT_BEGUN = "The loop has waited {first_wait_seconds} for its first batch, which is still on its way."

# Nothing is measured.
NO_PASS = "Nothing is known of the loop before the first pass: iterate over the loader."
NO_WORKERS = (
    "The loader has no workers, so the loop waits while each batch is loaded, and how long is not measured: give "
    "num_workers=1 or more, or workers."
)

# What makes the first batch come earlier, by whether the workers stay from one epoch to the next.
ADVICE = {
    False: "persistent_workers=True keeps the workers from one epoch to the next",
    True: "the workers stay from one epoch to the next already, so build the dataset or load its first batch faster",
}

# Fuller parts are named; emptier ones are not.
_WORTH_TELLING = 0.25

# Present work of the trainer, by its part.
REASONS = {
    "own": "which spends {own_seconds} per batch in next without sleeping: use larger batches",
    "decode": "and outside of next, too, as rebuilding batches takes {decode_share} of the interpreter's time: use "
    "larger batches, fewer tensors and less that must be unpickled",
    "receive": "which receives {received_rate} batches per second of {demand_rate}: use larger batches, fewer tensors "
    "and less that must be unpickled",
    "lock": "where bytes of each batch lay unread for {lock_seconds} while other code held the interpreter lock: move "
    "work in Python out of the loop and its threads",
}

# Parts inside a sentence, by capacity.
PARTS = {
    "workers": "the workers",
    "network": "the link",
    "trainer": "the trainer's process",
    "device_copy": "the copy to the device",
    "window": "the window",
    "own": "next itself",
    "draw": "the sampler",
}


def say(bound: str, values: Mapping[str, Value]) -> str:
    """Return the sentence of a bound."""
    sentence = NOT_BEGUN if bound == "start" and not values["batches"] else WORDS[bound]
    reason = REASONS.get(str(values.get("part")), "")
    return sentence.replace("{reason}", reason).format_map(_format(values))


def seen(values: Mapping[str, Value], num_workers: int) -> str:
    """Say what is known of the tasks of a pass that is too short for a verdict."""
    if "num_tasks" not in values:
        return ""
    count = f"{num_workers:,} worker{'s' * (num_workers != 1)}"
    return ": {num_tasks:.0f} tasks of {count} took {task_seconds} on average".format_map(
        _format({**values, "count": count})
    )


def remedy(
    more: tuple[int, int, int] | None,
    following: str | None,
    full: float,
    rate: float,
    left: tuple[str, float] | None = None,
) -> str:
    """Say what more workers would do.

    Args:
        more: Number of workers: at least, likely, at most; None if more would not help.
        following: Next limiting part, by its capacity.
        full: Use of that part with more workers; above 1 if it is the next bound.
        rate: Batches per second that it allows.
        left: Part that works in the thread of the loop, and the share of the loop's time that stays with it; None if
            that is harmless.
    """
    if more is None:
        return (
            f"more workers would not help, as {PARTS[following]} allows {_rate(rate)} batches per second"
            if following
            else ("use more workers")
        )
    low, likely, high = more
    count = f"{likely:,} more worker{'s' * (likely != 1)} ({low:,} to {high:,})"
    if following is not None and full > 1:
        return f"{count} would bring it to {_rate(rate)} batches per second, where {PARTS[following]} is the next bound"
    gain = "end that" if left is None else f"leave {_share(left[1])}, which {PARTS[left[0]]} takes"
    if following is None or full < _WORTH_TELLING:
        return f"{count} would {gain}"
    return f"{count} would {gain}; {PARTS[following]} would then be {_share(full)} full"


def _format(values: Mapping[str, Value]) -> dict[str, Value]:
    return {name: _of(name, value) if isinstance(value, float) else value for name, value in values.items()}


def _of(name: str, value: float) -> Value:
    if name == "batches":
        return f"{value:,.0f} batch{'es' * (value != 1)}"
    for end, write in (("_share", _share), ("_seconds", _seconds), ("_bytes", in_bytes), ("_rate", _rate)):
        if name.endswith(end):
            return write(value)
    return value


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _seconds(value: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{value * factor:.3g} {unit}"
    return f"{in_digits(value)} s"


def in_digits(number: float) -> str:
    """Three digits, with thousands separators: ``0``, ``0.25``, ``12.3``, ``1,234``."""
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number >= 0.001 else "0"


def in_bytes(number: float) -> str:
    """``0 B``, ``1.5 MB``: decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{in_digits(number)} TB"


def _rate(value: float) -> str:
    return "any number of" if math.isinf(value) else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
