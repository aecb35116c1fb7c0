"""Keep the workers with libraries that rebuild loaders: Hugging Face Accelerate, and the Trainer of Transformers.

Both replace a loader by one of torch's, made from its attributes, which would load in this process or on this machine.
The functions here let the library do so, for all that it adds (shards, devices, the end of an epoch), and then put an
:class:`~rpcdataloader.RPCDataloader` with the same sampler in place of the loader inside. A library is imported on
first use. Lightning keeps the class of a loader, and needs none of this.

With torch.distributed itself, :func:`gather_states` puts the states of all ranks into one checkpoint.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from rpcdataloader.loader.dataloader import RPCDataloader
from rpcdataloader.loader.dataset import RPCDataset

# Arguments that choose a batch's samples: the library's own loader has them.
_SAMPLING = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
_OPTIONS = [name for name in inspect.signature(RPCDataloader).parameters if name not in _SAMPLING]


def gather_states(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of all ranks' loaders, in the order of the ranks, on every rank.

    A collective call of the default process group. The result goes into the checkpoint that one rank writes, and from
    there into ``load_state_dict`` on every rank, which takes its own.

    Args:
        state: Result of ``state_dict()`` of this rank's loader.

    Returns:
        ``state`` alone, if torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [state]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, state)
    return found


def prepare(accelerator: Any, *objects: Any) -> Any:
    """``accelerator.prepare(*objects)``, in which an :class:`~rpcdataloader.RPCDataloader` keeps its workers.

    ``accelerator``'s configuration decides how the loader is split among the processes, and moves its batches to the
    device. From then on, ``accelerator.skip_first_batches`` is :func:`skip_first_batches`.

    Returns:
        As ``accelerator.prepare``: the prepared object, or a tuple of them in the same order.

    Raises:
        ValueError: Each process would have to split an iterable-style :class:`~rpcdataloader.RPCDataset` for itself.
    """
    # A prepared loader imitates the class of the loader inside; type() tells the difference.
    loaders = [found if issubclass(type(found), RPCDataloader) else None for found in objects]
    prepared = accelerator.prepare(
        *(found if loader is None else _plain(loader) for found, loader in zip(objects, loaders, strict=True))
    )
    results = prepared if isinstance(prepared, tuple) else (prepared,)
    for result, loader in zip(results, loaders, strict=True):
        if loader is not None:
            _use_workers(result, loader)
            sampler = result.get_sampler()
            if hasattr(sampler, "initial_seed") and sampler.generator is None:
                # Accelerate's seedable sampler makes its generator in the first epoch, and seeds it in each;
                # load_state_dict() comes before that.
                sampler.generator = torch.Generator()
    accelerator.skip_first_batches = skip_first_batches
    return prepared


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """``accelerate.skip_first_batches``, after which a prepared loader still has its workers.

    Skipped batches are not loaded. Loaders without workers of this package are left to Accelerate.
    """
    skip = importlib.import_module("accelerate").skip_first_batches
    loader = getattr(dataloader, "base_dataloader", None)
    if not isinstance(loader, RPCDataloader):
        return skip(dataloader, num_batches)
    # Accelerate builds the new loader from the one inside.
    dataloader.base_dataloader = _plain(loader)
    try:
        skipped = skip(dataloader, num_batches)
    finally:
        dataloader.base_dataloader = loader
    return _use_workers(skipped, loader)


class TrainerMixin:
    """Let a ``Trainer`` of Transformers load with workers: ``class RPCTrainer(TrainerMixin, Trainer): pass``.

    The Trainer chooses sampling, collating and the arguments ``dataloader_*``. The datasets are
    :class:`RPCDatasets <rpcdataloader.RPCDataset>`, or ordinary ones, which are sent to :attr:`workers`;
    ``dataloader_num_workers`` means what ``num_workers`` means to an :class:`~rpcdataloader.RPCDataloader`.

    Attributes:
        workers: Workers of ordinary datasets, as for :class:`~rpcdataloader.RPCDataloader`.
    """

    workers: str | Iterable[str] | None = None

    def get_train_dataloader(self) -> Any:
        # To resume in the middle of an epoch, a Trainer skips by this function, and offers no other way to choose it.
        importlib.import_module("transformers.trainer").skip_first_batches = skip_first_batches  # type: ignore[attr-defined]
        return self._with_workers("get_train_dataloader")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._with_workers("get_eval_dataloader", eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._with_workers("get_test_dataloader", test_dataset)

    def _with_workers(self, name: str, *dataset: Any) -> Any:
        this: Any = self
        # The Trainer first makes torch's loader, which refuses persistent workers with 0 workers. Here 0 means all
        # workers, so the Trainer sees 1 meanwhile.
        num_workers = this.args.dataloader_num_workers
        this.args.dataloader_num_workers = num_workers or 1
        try:
            prepared = getattr(super(), name)(*dataset)
        finally:
            this.args.dataloader_num_workers = num_workers
        loader = prepared.base_dataloader
        if isinstance(loader, RPCDataloader):  # one that the Trainer has kept
            return prepared
        # The Trainer's function to seed workers has no effect, since every sample is seeded.
        return _use_workers(
            prepared,
            loader,
            worker_init_fn=None,
            num_workers=num_workers,
            prefetch_factor=this.args.dataloader_prefetch_factor,
            workers=None if isinstance(loader.dataset, RPCDataset) else self.workers,
        )


def _sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments for another loader of the same batches."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    return {"batch_size": loader.batch_size, "sampler": sampler, "drop_last": loader.drop_last}


def _plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """torch's loader for Accelerate to take apart, without the options that torch refuses without workers."""
    options = {name: getattr(loader, name) for name in ("collate_fn", "generator", "pin_memory")}
    return DataLoader(loader.dataset, **_sampling(loader), **options)


def _use_workers(prepared: Any, options_of: DataLoader[Any], **changes: Any) -> Any:
    """Put an ``RPCDataloader`` into a loader that Accelerate has made; returns that loader."""
    inside = prepared.base_dataloader
    if isinstance(options_of.dataset, RPCDataset) and inside.dataset is not options_of.dataset:
        raise ValueError(
            "Accelerate cannot split an iterable-style RPCDataset among processes: let one process dispatch the "
            "batches, with DataLoaderConfiguration(dispatch_batches=True)"
        )
    options = {name: getattr(options_of, name) for name in _OPTIONS if hasattr(options_of, name)}
    loader = RPCDataloader(inside.dataset, **_sampling(inside), **{**options, **changes})
    if loader._where is not None:
        prepared.base_dataloader, prepared.dl_state_dict = loader, loader.state_dict()
    else:
        # Accelerate asks each loader that has the method for its state after each batch; this one would refuse.
        prepared.base_dataloader = _plain(loader)
    if hasattr(prepared, "_fetch_batches"):  # the first process dispatches the batches of all
        prepared._fetch_batches = functools.partial(_fetch_group, prepared)
        if prepared.state.process_index:
            prepared.load_state_dict = _loads_nothing
    return prepared


def _fetch_group(dispatcher: Any, batches: Any) -> Any:
    """Fetch the batches of all processes, and keep the state before them: a group is used when the next one is here.

    Accelerate keeps the state before the last one, as only the loaders of torchdata can step back.
    """
    loader = dispatcher.base_dataloader
    state = loader.state_dict() if isinstance(loader, RPCDataloader) else None
    found = type(dispatcher)._fetch_batches(dispatcher, batches)
    if state is not None:
        dispatcher.dl_state_dict = {**state, "_iterator_finished": False}
    return found


def _loads_nothing(state: Mapping[str, Any]) -> None:
    """Take the state of the first process, whose batches this one receives."""
