"""Names that mean something else in each process: what a source says of them, and what they are."""

from __future__ import annotations

import ast

from rpcdataloader.host.varying import varies, varying_names

SOURCE = """
import random
import uuid
import numpy
NAMES = {"cat", "dog", "owl", "fox", "hen", "elk"}
LISTED = list({"cat", "dog", "owl", "fox", "hen", "elk"})
OF_NAME: list = list(NAMES)
BY_NAME = {name: number for number, name in enumerate(NAMES)}
BY_NUMBER = dict(enumerate(set(NAMES)))
BOTH = tuple(NAMES | {"ant"})
UNPACKED = [*NAMES]
GENERATED = tuple(name.upper() for name in NAMES - {"ant"})
KEPT = [name for name in set(map(str.title, NAMES))]

class Labels:
    ALL = list(frozenset(NAMES))

SORTED = sorted(NAMES)
LENGTH = len(NAMES)
LITERAL = ["cat", "dog", "owl", "fox", "hen", "elk"]
COPIED = list(LITERAL)
NUMBERS = list({3, 1, 2})

RUN = "run-" + uuid.uuid4().hex[:4]
ORDER = numpy.random.default_rng().permutation(4)
SEEDED = numpy.random.default_rng(3).permutation(4)
OWN: random.Random = random.Random()
"""
VARYING = [
    "LISTED",
    "OF_NAME",
    "BY_NAME",
    "BY_NUMBER",
    "BOTH",
    "UNPACKED",
    "GENERATED",
    "KEPT",
    "Labels.ALL",
    "RUN",
    "ORDER",
    "OWN",
]


def found_in(namespace):
    def value_of(place):
        owner, *rest = place.split(".")
        return namespace[owner] if not rest else getattr(namespace[owner], rest[0])

    made = varying_names(ast.parse(SOURCE).body)
    return [place for place, sources in made if varies(value_of(place), sources, namespace)]


def test_orders_of_sets_of_texts_and_what_the_system_seeds_are_found():
    namespace = {"__name__": "labels"}
    exec(SOURCE, namespace)
    assert found_in(namespace) == VARYING
