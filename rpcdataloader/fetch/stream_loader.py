"""Load the batches of a stream, which is one worker's iterator over an iterable-style dataset.

How to continue from a position follows torchdata's StatefulDataLoader: the state is the iterator's if it has one, else
the dataset's. Without any state, or if it cannot be loaded, delivered samples are taken again and thrown away.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import signal
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from rpcdataloader.fetch.batch_loader import BatchLoader, Loaded, StreamState
from rpcdataloader.fetch.loaded import LoadedState, is_same_state, loaded_state, note_loaded, tell_not_implemented
from rpcdataloader.fetch.raw import Keeper, pack
from rpcdataloader.fetch.samples import WHOLE, Skipped, skipped, stopped, whereabouts
from rpcdataloader.fetch.seeding import SAMPLE, end_sample
from rpcdataloader.host.state import has_state
from rpcdataloader.wire.digests import digest
from rpcdataloader.wire.exceptions import add_state
from rpcdataloader.wire.picklers import Limited
from rpcdataloader.wire.pickling import freeze_reply

logger = logging.getLogger("rpcdataloader.loader")

# Samples of a stream that its digest has: the first ones, as a pass may be saved early, and then one in 64.
_NUM_FIRST, _EVERY = 16, 64

# Datasets whose content is larger are not looked at: they begin each pass that they may count.
_MAX_FINGERPRINT_BYTES = 1 << 16


class StreamLoader(BatchLoader):
    """Load the batches of one stream of an iterable-style dataset.

    The stream itself knows its position; the indices of a batch only give its number of samples. The seeds come from
    rank, stream and position in the stream.
    """

    # State of an earlier pass, which was read to its end, and to which the dataset is to be brought when it is opened.
    _before: StreamState | None = None

    _is_limited = False  # True while a sample is taken again whose time is limited

    def _begin(self) -> None:
        if (stream := self._spec.stream) is not None and stream.ended:
            self._before = stream
        elif self._spec.before is not None:
            self._before = self._spec.before
        # What follows becomes a StreamState after a batch. Apart, as each sample changes some of it.
        # The last state that was asked for, before the end, with its number of samples.
        self._kept: tuple[Any, int] | None = None
        self._iterator: Iterator[Any] | None = None
        self._ended = self._spec.stream is not None and self._spec.stream.ended
        self._keeper = Keeper() if self._collate is pack else None  # of the stream of a loader with a transform
        self._num_samples = 0
        self._num_batches = 0
        self._failed_at = -1  # number of samples after the last skipped one
        self._digest: int | None = None  # as in StreamState
        self._owner = ""  # as in StreamState
        self._loaded: LoadedState | None = None  # into the dataset, until the first sample of this pass
        # True until the first sample after a state that was loaded.
        self._can_replay = self._spec.stream is not None and bool(self._spec.stream.owner)
        self._failed_state: Exception | None = None  # why such a state was of no use

    def load(self, indices: Any, position: int, batch_number: int, part: int = WHOLE) -> Loaded:
        """Load one batch, as any; an exception, which takes the place of a batch, has the state after it."""
        try:
            return super().load(indices, position, batch_number, part)
        except BaseException as error:
            self._missing = []
            with contextlib.suppress(Exception):  # of the user's state_dict
                add_state(error, self._state() or self._spec.ended_stream)
            raise

    def _fetch(self, indices: Any, position: int, batch_number: int) -> list[Any]:  # noqa: ARG002
        whereabouts.sample[0] = self._num_samples
        samples: list[Any] = []
        if self._keeper is not None:
            self._keeper.begin()
        for _ in range(len(indices) if self._spec.auto_collation else 1):
            if self._ended:
                break
            try:
                self._take_sample(samples)
            except BaseException as error:
                self._num_samples += self._iterator is not None  # skipping repeats failed ones
                self._ended = self._iterator is None  # as with torch: there are no more batches
                if self._ended or not self._skip([self._num_samples - 1], error):
                    sample = f"position {self._num_samples - 1}" if self._num_samples else "the beginning"
                    self._name(error, f"{sample} of stream {self._spec.worker_id}, batch {self._num_batches}")
                    raise
                self._failed_at = self._num_samples
        return [] if self._ended and self._spec.drop_last else samples

    def _take_sample(self, samples: list[Any]) -> None:
        """Append the next sample, or note the end."""
        if self._iterator is None:
            self._iterator = self._open()
        whereabouts.sample[0] = self._num_samples
        self._begin_sample(number := self._num_samples)
        try:
            samples.append(next(self._iterator))
            self._num_samples += 1
        except StopIteration:
            pass
        except Exception as error:
            self._digest = None  # the failure may pass
            if self._begins_anew(samples, number) or self._replays(error):
                self._take_sample(samples)
                return
            raise
        if self._loaded is not None and self._begins_anew(samples, number):
            self._take_sample(samples)
            return
        self._can_replay = False
        if number == self._num_samples:
            self._ended = True
        else:
            self._note(number, samples[-1])
            if self._owner and self._kept is None:  # its first batch may be its last one
                with contextlib.suppress(Exception):  # which comes after the batch
                    self._kept = self._frozen(self._present_state(self._iterator)), number + 1
            if self._keeper is not None:
                samples[-1] = self._keeper.keep(samples[-1])

    def _begins_anew(self, samples: list[Any], number: int) -> bool:
        """Whether the iteration has begun where a state of an earlier pass says, and so begins again."""
        loaded, self._loaded = self._loaded, None
        ended = number == self._num_samples
        if loaded is None or not loaded.gave_first(self._dataset, ended=ended):
            return False
        if not ended:
            samples.pop()
        self._num_samples, self._iterator = number, None
        return True

    def _replays(self, error: Exception) -> bool:
        """Whether a stream goes on without its state, which cannot be loaded: what was delivered is taken again."""
        if not self._can_replay:
            return False
        self._can_replay, self._loaded, self._iterator = False, None, None
        if (loaded := loaded_state(self._dataset)) is not None:
            loaded.undo()
            note_loaded(self._dataset, None)
        assert self._spec.stream is not None
        self._failed_state, self._spec = error, replace(self._spec, stream=self._spec.stream._replace(owner=""))
        logger.warning(
            "stream %d of %s is read again from its beginning, as loading its state failed with %s: %s",
            *(self._spec.worker_id, type(self._dataset).__name__, type(error).__name__, error),
        )
        return True

    def _note(self, number: int, sample: Any) -> None:
        """Note what sample ``number`` of the stream is."""
        if self._digest is not None and (number < _NUM_FIRST or not number % _EVERY):
            self._digest = digest(sample, self._digest)

    def _skipped(self, samples: list[Any]) -> Skipped | None:
        missing, self._missing = self._missing, []
        # The stream has ended right after a skipped sample, which is told once.
        if ends := self._ended and self._failed_at == self._num_samples:
            self._failed_at = -1
        if missing or ends:
            lacks = skipped(missing, is_whole=not samples, stream=self._spec.worker_id, ends=ends)
        else:
            lacks = None
            if not samples:
                self._iterator = None
                return None
        self._num_batches += 1
        return lacks

    def _collate_samples(self, samples: list[Any], batch_number: int) -> Any:  # noqa: ARG002
        if self._iterator is None:
            return None
        return super()._collate_samples(samples if self._spec.auto_collation else samples[0], self._num_batches - 1)

    def _describe(self, indices: Any, batch_number: int) -> str:  # noqa: ARG002
        return f"batch {self._num_batches - 1} of stream {self._spec.worker_id}"

    def go_on(self) -> None:
        """Load the state of the stream, or take again what was delivered."""
        saved = self._spec.stream or StreamState()
        if saved.ended:
            return
        if not (saved.owner or (self._before and self._before.owner) or hasattr(self._dataset, "set_epoch")):
            self._begin_earlier_passes()
        if not (saved.owner or saved.num_samples):
            return
        try:
            self._iterator = self._open()
        except BaseException as error:
            self._name(error, f"the beginning of stream {self._spec.worker_id}")
            raise
        finally:
            end_sample()

    def _begin_earlier_passes(self) -> None:
        """Begin those of persistent workers that this process has not seen: the dataset may count them.

        They were read to their ends, so what the dataset counts by samples, such as a position, is set back.
        """
        spec = self._spec
        try:
            for epoch in range(spec.epoch):
                self._spec = replace(spec, epoch=epoch, stream=None)
                self._begin()
                before = self._content()
                self._take_first(before)
                if before is not None and before == self._content():
                    break
        finally:
            self._spec = spec
            self._begin()

    def _content(self) -> dict[str, bytes] | None:
        """The dataset's attributes, pickled; None if that would take long."""
        content = {}
        room = _MAX_FINGERPRINT_BYTES
        try:
            for name, value in vars(self._dataset).items():
                file = Limited(room)
                pickle.Pickler(file, 5).dump(value)
                content[name] = file.getvalue()
                room -= len(content[name])
        except Exception:
            return None
        return content

    def leave(self) -> None:
        """Let a pass begin that was left before: the dataset may count them, and torch's workers do so."""
        saved = self._spec.stream or StreamState()
        if not (self._num_samples or self._ended or saved.owner or saved.num_samples):
            self._take_first()

    def _take_first(self, before: dict[str, bytes] | None = None) -> None:
        """Begin the stream, and throw its first sample away.

        Args:
            before: Attributes of the dataset. Those that change with the second sample, too, become what they were.
        """
        if self._keeper is not None:
            self._keeper.begin()
        try:
            self._begin_step()
            self._take_sample([])
            if before is not None and before != (after := self._content()):
                self._begin_step()
                self._take_sample([])
                self._set_back(before, after)
        except BaseException:  # of the dataset, as no signal handler raises in a worker
            logger.debug("a stream that was left fails at its beginning", exc_info=True)
        finally:
            self._end_step()
            end_sample()
        self.close()

    def _set_back(self, before: dict[str, bytes], after: dict[str, bytes] | None) -> None:
        for name, value in (self._content() or {}).items():
            if name in before and after is not None and value not in (before[name], after.get(name)):
                setattr(self._dataset, name, pickle.loads(before[name]))

    def _begin_step(self) -> None:
        """Let the kernel end this process if the next sample, which is none of a batch, takes longer than a batch may.

        The time of a task begins later, as nothing tells how many samples are taken again. A user's handler stays.
        """
        seconds = self._spec.task_timeout
        if not (seconds is None or self._inline) and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            self._is_limited = True

    def _end_step(self) -> None:
        if self._is_limited:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._is_limited = False

    def close(self) -> None:
        """End the stream: a generator's ``finally`` and ``with`` blocks run now."""
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, Generator):
            iterator.close()

    def _open(self) -> Iterator[Any]:
        try:
            return self._open_iterator()
        except StopIteration as stop:
            raise stopped(f"{type(self._dataset).__name__}.__iter__()") from stop
        except Exception as error:
            if self._replays(error):
                return self._open()
            raise

    def _open_iterator(self) -> Iterator[Any]:
        """Iterate over the dataset from the saved position."""
        saved = self._spec.stream or StreamState()
        self._begin_sample(-1)
        before, self._before = self._before, None
        # Where the script tells the epoch, it has done so by now.
        counts = not hasattr(self._dataset, "set_epoch")
        if before is not None and before.owner and not saved.owner and counts:
            self._end_before(before)
            self._begin_sample(-1)
        loaded = loaded_state(self._dataset)
        if loaded is not None:
            loaded.was_used(self._dataset)
        iterator = self._iterate_from(saved)
        self._owner = self._owner_of_state(iterator)
        self._kept = (self._frozen(saved.state), saved.at) if saved.owner else None
        self._digest = None if self._owner else 0
        for number in range(0 if saved.owner else saved.num_samples):
            self._begin_step()
            self._begin_sample(number)
            try:
                self._note(number, next(iterator))
            except StopIteration:
                raise ValueError(
                    "the saved pass had delivered more samples than this iterable-style dataset has now"
                ) from None
            except BaseException as error:  # as before, when it was delivered
                if self._inline and not isinstance(error, Exception):  # Ctrl-C, which ends the pass
                    raise
                logger.debug("a skipped sample has failed again", exc_info=True)
                if self._spec.skips:
                    self._failed_at = number + 1
            finally:
                self._end_step()
        if self._failed_state is not None and not (
            self._owner and is_same_state(saved.state, self._present_state(iterator))
        ):
            raise self._failed_state
        if None not in (saved.digest, self._digest) and saved.digest != self._digest:
            self._differs()
        self._num_samples, self._num_batches = saved.num_samples, saved.num_batches
        return iterator

    def _iterate_from(self, saved: StreamState) -> Iterator[Any]:
        """Load a state of the dataset before, and one of its iterator after, the dataset is iterated over."""
        dataset, loaded = self._dataset, loaded_state(self._dataset)
        states = saved.state if saved.owner == "both" else {saved.owner: saved.state}
        # A dataset that is its own iterator may take its state when its iteration begins, or set it back then.
        is_both = saved.owner == "iterator" and hasattr(type(dataset), "__next__") and has_state(dataset)
        if is_both or "dataset" in states:
            state = states["iterator" if is_both else "dataset"]
            if loaded is not None:
                loaded.undo(only_if_unchanged=True)
            loaded = LoadedState(dataset, state, lambda: _load_state("dataset", dataset, state))
            note_loaded(dataset, loaded)
        if loaded is not None:
            loaded.begins(dataset)
        self._loaded = loaded
        iterator: Any = iter(dataset)
        if "iterator" in states:
            state = states["iterator"]
            if not (is_both and iterator is dataset and is_same_state(state, iterator.state_dict())):
                _load_state("iterator", iterator, state)
        return iterator  # type: ignore[no-any-return]

    def _end_before(self, before: StreamState) -> None:
        """Bring the dataset to the end of the pass before, as its own process has: it may count its epochs, or samples.

        The samples after the state were delivered, or left out by ``drop_last``, in that pass. One that was left early
        has only its counts: the next one does not begin at its place.
        """
        try:
            if not before.ended and before.owner == "dataset":
                left = LoadedState(
                    self._dataset, before.state, lambda: _load_state("dataset", self._dataset, before.state)
                )
                left.cancel(self._dataset)
                left.keep_later_epochs()
                return
            iterator = self._iterate_from(before)
            if not before.ended:
                self._loaded = None
                note_loaded(self._dataset, None)
                return
            num_samples = before.num_samples
            if self._spec.drop_last and before.num_batches:
                num_samples += before.num_samples // before.num_batches - 1
            number, has_ended = before.at, False
            while number <= num_samples and not has_ended:
                self._begin_step()
                self._begin_sample(number)
                try:
                    next(iterator)
                except StopIteration:
                    has_ended = True
                except Exception:  # as when it was delivered
                    logger.debug("a sample of the pass before has failed again", exc_info=True)
                finally:
                    self._end_step()
                if self._loaded is not None:
                    self._loaded.gave_first(self._dataset, ended=has_ended)
                    self._loaded = None
                number += 1
            loaded = loaded_state(self._dataset)
            if not has_ended and before.at == before.num_samples:
                # The end of a pass is the beginning of the next one.
                self._iterate_from(before)
                note_loaded(self._dataset, None)
            if loaded is not None:
                loaded.keep_later_epochs()
        except Exception as error:
            logger.warning(
                "stream %d of %s begins as in its first pass, as its state after the last one is of no use: %s: %s",
                *(self._spec.worker_id, type(self._dataset).__name__, type(error).__name__, error),
            )

    def _differs(self) -> None:
        """Refuse to resume in other samples; a stream whose worker was lost goes on with them."""
        text = (
            f"stream {self._spec.worker_id} of {type(self._dataset).__name__} gives other samples now than those that "
            "were delivered: seed what its order and its random numbers are drawn from, or give the dataset "
            "state_dict() and load_state_dict()"
        )
        if self._spec.resumes:
            raise ValueError(text)
        logger.warning("on its new worker, %s; until then, samples are lost or come twice", text)

    def _owner_of_state(self, iterator: Any) -> str:
        """The name of what has a state from which the stream continues; empty if samples are taken again."""
        if not has_state(iterator):
            return "dataset" if has_state(self._dataset) else ""
        return "both" if iterator is not self._dataset and has_state(self._dataset) else "iterator"

    def _present_state(self, iterator: Any) -> Any:
        if self._owner == "both":
            return {"dataset": self._dataset.state_dict(), "iterator": iterator.state_dict()}
        return (iterator if self._owner == "iterator" else self._dataset).state_dict()

    def _state(self) -> StreamState | None:
        if self._iterator is None:
            return None
        num_samples, num_batches = self._num_samples, self._num_batches
        if not (name := self._owner):
            return StreamState(num_samples, num_batches, ended=self._ended, digest=self._digest)
        if self._ended:  # from which nothing goes on; the state before it is the way to the next pass
            if self._kept is None:
                return StreamState(num_samples, num_batches, ended=True)
            state, at = self._kept
            return StreamState(num_samples, num_batches, name, state, ended=True, at=at)
        try:
            present = self._present_state(self._iterator)
        except NotImplementedError as error:  # of a base class: the stream has no state
            self._owner = ""
            tell_not_implemented(self._dataset, error)
            return StreamState(num_samples, num_batches)
        state = self._frozen(present)
        self._kept = state, num_samples
        return StreamState(num_samples, num_batches, name, state, at=num_samples)

    def _frozen(self, state: Any) -> Any:
        """A copy of a state: the dataset may go on changing the same object."""
        if self._inline:
            return copy.deepcopy(state)
        names = "dataset and its iterator" if self._owner == "both" else self._owner
        return freeze_reply(state, name=f"the state of the {names}")

    def _begin_sample(self, number: int, purpose: bytes = SAMPLE) -> None:
        # -1 stands for the time before the first sample.
        number += purpose is SAMPLE
        super()._begin_sample(number * self._spec.num_workers + self._spec.worker_id, purpose)


def _load_state(name: str, owner: Any, state: Any) -> None:
    """Load the saved state of the ``"dataset"``, before the iterator is created, or of the ``"iterator"``.

    Raises:
        ValueError: The state is of another kind of dataset.
    """
    if not hasattr(owner, "load_state_dict"):
        raise ValueError(
            f"the {name} was saved by its state_dict(), but {type(owner).__name__} has no load_state_dict()"
        )
    owner.load_state_dict(copy.deepcopy(state))
