"""All texts of a diagnosis. Pure.

Values are formatted by the end of their names: ``_share``, ``_seconds``, ``_bytes``, ``_rate`` (batches per second).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Value = float | str

# Nothing is measured.
NO_PASS = "Nothing is known of the loop before the first pass: iterate over the loader."

# Begins each sentence: what the loop would reach without a loader.
_STEP = (
    "step {step_seconds} = {yours_seconds} yours + {waiting_seconds} waiting ({wait_share}): {delivered_rate} it/s, "
    "{demand_rate} without the loader. "
)

# The sentence of each bound and part, with the names of values in braces; docs/waiting.md says when each is the bound.
WORDS = {
    "none": "There is nothing to gain.",
    "start": "{first_wait_seconds} passed before the first batch, {part_seconds} of it {doing}: {advice}.",
    "workers": "{num_workers} worker{s}: {spent}. {advice}.",
    "workers here": "This process loads each batch itself, in {task_seconds}. {advice}.",
    "node node": "The workers of node {name} take {slow_factor} times as long as the others: look at its load and "
    "storage, or leave it out.",
    "node worker": "Single batches are late while later ones are here, {worst_share} of that by {name}: look at that "
    "worker, or hide it with a larger prefetch_factor or in_order=False.",
    "network": "The network carries {network_rate} it/s ({link_bytes}/s): send less than {batch_bytes} per batch "
    "(uint8 in place of float32, crops, compressed data), or use a faster link.",
    "trainer sampler": "The sampler takes {draw_seconds} per batch: make it cheaper, or draw the indices in advance.",
    "trainer source": "The source of the stream takes {draw_seconds} per batch: give it more source_workers, if the "
    "stream has shards for them, or move work from the stream into transform.",
    "trainer receiving": "This process spends {receiving_seconds} on receiving and rebuilding each batch of "
    "{batch_bytes}: {less}.",
    "trainer lock": "Bytes of each batch lay unread for {lock_seconds} while other code held the interpreter lock, or "
    "the CPUs of this process: move work in Python out of the loop and its threads.",
    "trainer copies": "Copies to the device take {copy_seconds} per batch of {batch_bytes}: send smaller types (uint8 "
    "in place of float32), and convert them on the device.",
    "trainer next": "The loader's own work in this process takes {own_seconds} per batch: {next}.",
    "setting": "Each batch takes {latency_seconds}, {allowed} may be in flight, and {in_flight} are needed: set "
    "{setting} (now {current}).",
    "unclear": "What is known of {batches} does not say why. A pass of more batches may.",
    # Of a pass without a batch, by the part of the start that is under way.
    "unclear pool": "No batch after {first_wait_seconds}: waiting for a worker, or the dataset that is being built.",
    "unclear build": "No batch after {first_wait_seconds}: waiting for the imports and the dataset of the first "
    "worker, or worker_init_fn.",
    "unclear batch": "No batch after {first_wait_seconds}: waiting for the first batch, which is being loaded.",
}

# What to do about the work of this process on each batch, by whether it is a large one.
_LESS = {
    False: "use larger batches, fewer tensors and less that must be unpickled",
    True: "give this process more CPUs, or send fewer bytes (uint8 in place of float32, crops)",
}

# Parts of the start: what takes the time, and what ends it.
_START = {
    "sending": (
        "on pickling, sending and unpickling the dataset",
        "RPCDataset(workers, Class, ...) in place of an instance builds it on the nodes",
    ),
    "dataset": ("on building the dataset", "make the RPCDataset once, outside of the loop, or its constructor faster"),
    "pool": (
        "until a worker was there",
        "persistent_workers=True keeps the workers, and a running node server (python -m rpcdataloader.launch) with "
        "--preload has imported slow modules before",
    ),
    "build": (
        "on imports and the dataset in the worker",
        'build="node" builds it once per node, and persistent_workers=True keeps the workers',
    ),
    "init": ("in worker_init_fn", "persistent_workers=True calls it once"),
    "batch": ("on loading the first batch", "it weighs less in a longer pass, or with samples that load faster"),
}
_STAYS = "the workers stay, so the next passes begin without that"

# Parts inside a sentence, by capacity or by work of the loop's thread.
_PARTS = {
    "network": "the link",
    "receiving": "receiving in this process",
    "copies": "the copy to the device",
    "window": "max_in_flight_bytes",
    "next": "the loader's own work in this process",
    "sampler": "the sampler",
    "source": "the source of the stream",
}

# Advice without a number of workers.
_ADVICE = {
    "shards": "Only {num_loading} of them get samples: more would get none, unless the dataset has more shards",
    "capped": "More would not help, as {following} allows {allowed_rate} it/s",
    "empty": "The loop itself takes next to no time, so it would wait for any number of workers: give it a training "
    "step",
}

_LARGE_BYTES = 1e6


def say(bound: str, part: str, values: Mapping[str, Value], more: tuple[int, int, int] | None = None) -> str:
    """Return the sentence of a bound, or of a part of it; ``more`` is a number of workers: least, likely, most."""
    words = WORDS.get(f"{bound} {part}") or WORDS[bound]
    less = _LESS[float(values.get("batch_bytes", 0)) >= _LARGE_BYTES]
    texts = {"less": less, "next": less.split(",")[0]}
    if bound == "start":
        texts["doing"], texts["advice"] = _START[part]
        if part == "batch" and float(values["first_workers"]) > 1:
            texts["doing"] += f", by {values['first_workers']:.0f} workers together"
        texts["advice"] = _STAYS if values["stays"] else texts["advice"]
    elif bound == "workers":
        texts["advice"] = _advise(values, more)
        texts["spent"] = "" if part else _spent(values)
        texts["s"] = "s" * (values.get("num_workers") != 1)
    return ((_STEP if bound != "unclear" or not part else "") + words).format_map({**_format(values), **texts})


def in_short(share: float, part: str, more: tuple[int, int, int] | None) -> str:
    """Return a verdict in at most 30 characters."""
    what = {"max_in_flight_bytes": "bytes in flight", "here": "workers"}.get(part, part)
    if more is not None:
        what = f"{more[1]} more worker{'s' * (more[1] != 1)}"
    return (f"waits {_share(share)}" + (f": {what}" if part != "none" else ""))[:30]


def _spent(values: Mapping[str, Value]) -> str:
    """Say what the workers spend their time on."""
    if values["cpu_share"] == values["runqueue_share"] == 0:
        return "each takes {task_seconds} per batch".format_map(_format(values))
    stages = {values["source"]: "fetch", "collate": "collate", "pickling": "encode"}
    percents = {name: round(100 * float(values[f"{stage}_cpu_share"])) for name, stage in stages.items()}
    parts = ", ".join(f"{percent} {name}" for name, percent in percents.items() if percent)
    spent = "{cpu_share} on a CPU" + (f" ({parts})" if parts else "") + ", {off_cpu_share} not on a CPU"
    spent += ", {runqueue_share} waiting for a CPU"
    if "cpus" in values:
        spent += "; CPUs of their nodes {busy_cpus} of {cpus} busy"
    return spent.format_map(_format(values))


def _advise(values: Mapping[str, Value], more: tuple[int, int, int] | None) -> str:
    """Say what more workers would do."""
    names = {name: _PARTS[str(values[name])] for name in ("following", "keeps") if name in values}
    texts = {**_format(values), **names}
    if more is None:
        return _ADVICE[str(values["advice"])].format_map(texts)
    least, likely, most = more
    advice = f"Add {likely:,} worker{'s' * (likely != 1)}{values.get('where', '')} ({least:,} to {most:,})"
    if "following" in values:
        advice += ", for {allowed_rate} it/s, which is all that {following} allows"
    elif "keeps" in values:
        advice += "; {kept_share} of waiting would remain, for {keeps}"
    if values.get("source") == "source":
        advice += ", if the dataset has shards for them"
    return advice.format_map(texts)


def _format(values: Mapping[str, Value]) -> dict[str, str]:
    return {name: _of(name, value) for name, value in values.items()}


def _of(name: str, value: Value) -> str:
    if isinstance(value, str):
        return value
    if name == "batches":
        return f"{value:,.0f} batch{'es' * (value != 1)}"
    unit = name.rpartition("_")[2]
    return {"share": _share, "seconds": _seconds, "bytes": in_bytes}.get(unit, in_digits)(value)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _seconds(value: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{value * factor:.3g} {unit}"
    return f"{in_digits(value)} s"


def in_digits(number: float) -> str:
    """Three digits, with thousands separators: ``0``, ``0.25``, ``12.3``, ``1,234``."""
    if math.isinf(number):
        return "any number of"
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
