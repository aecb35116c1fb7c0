"""What a process of a server has of the script's definitions, as far as its client knows: what it lacks is sent."""

from __future__ import annotations

from collections.abc import Iterable

from rpcdataloader.wire.definitions import Definition, Have, Table

# Smaller definitions are sent to each worker, which skips those that it has inherited.
_MIN_INHERITED_BYTES = 1 << 16


class Known:
    """What one process of a server has of the definitions, as far as its client knows.

    With a lock of the caller held.

    Args:
        have: Tells of which globals it has since its beginning.
    """

    def __init__(self, have: Have = lambda _name: False) -> None:
        self._have = have
        self._tokens: dict[str, bytes] = {}  # of what has arrived
        self._sent: dict[str, tuple[bytes, int]] = {}  # last tokens, with the number of their message
        self._num_sent = 0  # messages
        self._large: set[str] = set()
        self._parent: Known | None = None  # until the process is forked, with the number of messages sent to that

    def inherit(self) -> Known:
        """What a process has that is forked from this one later, and then :meth:`begun`."""
        child = Known(self._have)
        child._tokens = {name: token for name, token in self._tokens.items() if name in self._large}
        child._parent, child._num_sent = self, self._num_sent
        return child

    def begun(self) -> None:
        """Note that the process was forked, perhaps after its parent was sent other definitions than these.

        Without the lock of the parent, which is sent nothing in between that counts.
        """
        parent, self._parent = self._parent or self, None
        self._tokens = {name: token for name, token in self._tokens.items() if parent._sent[name][1] <= self._num_sent}

    def lacking(self, table: Table) -> list[Definition]:
        """The definitions that the process may lack."""
        found = dict.fromkeys(table.values())
        return [each for each in found if any(self._tokens.get(name) != token for name, token in self._new(each))]

    def _new(self, definition: Definition) -> list[tuple[str, bytes]]:
        return [each for each in definition.tokens if not self._have(each[0])]

    def sending(self, definitions: Iterable[Definition]) -> None:
        """Note that definitions are sent: until they have arrived, the process may have these or others."""
        self._num_sent += 1
        for each in definitions:
            for name, token in each.tokens:
                self._tokens.pop(name, None)
                self._sent[name] = token, self._num_sent

    def arrived(self, definitions: Iterable[Definition]) -> None:
        """Note that the process has used a message with these definitions."""
        for each in definitions:
            for name, token in each.tokens:
                if self._sent[name][0] == token and each.on_demand is None:
                    self._tokens[name] = token
                    (self._large.add if len(each.pickled) >= _MIN_INHERITED_BYTES else self._large.discard)(name)
