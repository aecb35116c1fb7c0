"""Where a loader is in its pass, to be saved and gone on from: torchdata's protocol."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.loader.measured import MeasuredLoader
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import VERSION, end_pass, state_of_rank, to_state

_T_co = TypeVar("_T_co", covariant=True)


class _NoStateError(LocalProtocolError, AttributeError):
    """Also what ``hasattr`` expects."""


class ResumableLoader(MeasuredLoader[_T_co]):
    """The part of ``RPCDataloader`` that has a state; see there."""

    def state_dict(self) -> dict[str, Any]:
        """Where the last iterator of this loader is, for :meth:`load_state_dict`; that of torchdata's loaders.

        It counts what was delivered, not what is being prefetched, and takes some 25 KB as JSON, mostly the states of
        the global generators when the epoch began, from which samplers draw. The states of samplers and of
        iterable-style datasets that have a ``state_dict()`` of their own are part of it.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``).
        """
        self._check_can_resume()
        if self._progress is None:
            return dict(self._saved or {"version": VERSION})
        return to_state(*self._progress)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Let the next iterator go on where the saved one was: the remaining batches, bit for bit.

        The number of workers may be another one for map-style datasets; iterable-style ones get as many as before. With
        the states of all ranks, they go on with another number of ranks, each with its share of the streams. What was
        delivered is not loaded again, and the global generators of this process stay as they are. A state of the end of
        an epoch lets the next one begin.

        Args:
            state_dict: What :meth:`state_dict` has returned here; or a list of what it has returned on all ranks, as
                :func:`~rpcdataloader.integrations.gather_states` makes it.

        Raises:
            LocalProtocolError: The loader has no workers (``num_workers=0``).
            TypeError: ``state_dict`` is neither a mapping nor a list of mappings.
            ValueError: It belongs to another kind of loader, or the states of all ranks do not fit together. When
                iterating: or the sampler is too short for it.
        """
        self._check_can_resume()
        settings = PassSettings.of(self)
        state = state_of_rank(settings, state_dict)
        if state.get("finished"):
            end_pass(settings, state)
        self._saved = copy.deepcopy(state)
        self._progress = None

    def _check_can_resume(self) -> None:
        if self._where is None:
            raise _NoStateError(
                "this loader has no workers, so it is torch's own, which cannot resume: give num_workers=1 or more, or "
                "workers='inline' to load in this process"
            )
