"""What can go wrong in the study, beyond bugs."""

from __future__ import annotations


class StudyError(Exception):
    """An argument, a program or a storage is not usable; the message names it and says what to do."""


class SampleError(Exception):
    """A stored sample is missing, refused or damaged; the message names bucket, key and sample."""


class UnavailableError(SampleError):
    """The storage did not answer, or broke off; it may be back later."""
