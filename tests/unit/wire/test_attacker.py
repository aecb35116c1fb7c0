"""An attacker on the path, without the secret, as state machines: what is believed is what the other side has said."""

from __future__ import annotations

import contextlib
import dataclasses
import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, precondition, rule

from rpcdataloader.errors import AuthenticationError, LocalProtocolError, RemoteProtocolError
from rpcdataloader.wire.frames import HEADER_SIZE, Decoder, MessageType, Sealer, heap_blocks
from rpcdataloader.wire.handshake import Handshake, Preamble
from tests.unit.wire.test_frames import KEY, content, feed, join
from tests.unit.wire.test_handshake import CLIENT, SECRET, SERVER, TICKET, decode

NAMES = st.sampled_from(["host", "role", "pid", "rank", "nonce", "proof"])
preambles = st.sampled_from([Preamble(TICKET), Preamble(bytes(16)), Preamble(TICKET, tls=True)])

DIGESTED = (MessageType.CALL, MessageType.BUILD)


class SealedStream(RuleBasedStateMachine):
    """One direction of a connection; the attacker holds back, changes, repeats and makes up messages."""

    def __init__(self):
        super().__init__()
        self.sealer, self.stray = Sealer(KEY), Sealer(b"another key")
        self.decoder = Decoder(heap_blocks, Sealer(KEY))
        self.sent, self.wire = [], []  # contents, and bytes of each
        self.num_believed = 0
        self.is_over = False

    @rule(
        type=st.sampled_from(MessageType),
        number=st.integers(0, 2**64 - 1),
        payload=st.binary(max_size=40),
        blocks=st.lists(st.binary(max_size=20), max_size=3),
    )
    def send(self, type, number, payload, blocks):
        self.sent.append((type, 0, number, payload, blocks))
        self.wire.append(join(self.sealer, type, number, payload, blocks))

    @precondition(lambda self: self.num_believed < len(self.wire))
    @rule(steps=st.lists(st.integers(1, 50), max_size=20))
    def pass_on(self, steps):
        """The next one, in pieces of any size."""
        self.arrives(self.wire[self.num_believed], is_genuine=not self.is_over, steps=steps)

    @precondition(lambda self: self.wire)
    @rule(place=st.integers(0, 50))
    def replay_drop_or_swap(self, place):
        place %= len(self.wire)
        if place != self.num_believed:
            self.arrives(self.wire[place])

    @precondition(lambda self: self.num_believed < len(self.wire))
    @rule(position=st.integers(0, 300), change=st.integers(1, 255))
    def change(self, position, change):
        type, *_, blocks = self.sent[self.num_believed]
        data = bytearray(self.wire[self.num_believed])
        # Blocks of other messages than requests have no digest: they are batches, too many to hash.
        position %= len(data) if type in DIGESTED else len(data) - sum(map(len, blocks))
        data[position] ^= change
        self.arrives(bytes(data))

    @precondition(lambda self: self.num_believed and self.num_believed < len(self.wire))
    @rule()
    def put_an_earlier_body_under_a_fresh_header(self):
        type, *_, blocks = self.sent[self.num_believed]
        before, now = (data[HEADER_SIZE:] for data in self.wire[self.num_believed - 1 : self.num_believed + 1])
        body = before[: len(now)].ljust(len(now))
        if body != now and (type in DIGESTED or not any(blocks)):
            self.arrives(self.wire[self.num_believed][:HEADER_SIZE] + body)

    @rule(type=st.sampled_from(MessageType), payload=st.binary(max_size=40), is_sealed=st.booleans())
    def make_one_up(self, type, payload, is_sealed):
        self.arrives(join(self.stray if is_sealed else None, type, 1, payload))

    def arrives(self, data, is_genuine=False, steps=()):
        try:
            (found,) = feed(self.decoder, data, steps) or [None]
        except RemoteProtocolError:
            assert not is_genuine
            self.is_over = True
        else:
            # Nothing comes after an alteration, and a changed length is never waited for.
            assert is_genuine
            assert content(found) == self.sent[self.num_believed]
            self.num_believed += 1


class Handshakes(RuleBasedStateMachine):
    """Clients and servers that hold one secret; the attacker carries all that they say, and may change and mix it."""

    sides, words = Bundle("sides"), Bundle("words")

    def __init__(self):
        super().__init__()
        self.all = []

    def begin(self, identity, preamble):
        number = len(self.all)
        nonce = number.to_bytes(32, "big")
        side = Handshake(SECRET, dataclasses.replace(identity, pid=number), preamble, nonce)
        self.all.append(side)
        return side

    @rule(target=sides, preambles=st.tuples(preambles, preambles))
    def two_begin(self, preambles):
        return multiple(self.begin(CLIENT, preambles[0]), self.begin(SERVER, preambles[1]))

    @rule(
        target=words,
        preambles=st.tuples(preambles, preambles),
        num_steps=st.integers(0, 4).map(lambda left: 4 - left),
        place=st.none() | st.integers(0, 3),
        name=NAMES,
    )
    def two_talk(self, preambles, num_steps, place, name):
        """As far as this goes, with one field of one message changed, or the preamble, or nothing."""
        client, server = self.begin(CLIENT, preambles[0]), self.begin(SERVER, preambles[1])
        said, speaker, hearer = [], client, server
        for step in range(num_steps):
            for spoken in self.hear(speaker):
                said.append(self.change(spoken, name) if step == place else spoken)
                self.tell(hearer, said[-1])
            speaker, hearer = hearer, speaker
        if num_steps == 4 and place is None:
            assert (client in self.convinced) == (server in self.convinced) == (preambles[0] == preambles[1])
        return multiple(*said)

    def hear(self, side):
        return decode(side.data_to_send().removeprefix(side._preamble.encode()))

    @rule(target=words, side=sides)
    def listen(self, side):
        return multiple(*self.hear(side))

    @rule(target=words, said=words, name=NAMES)
    def change(self, said, name):
        fields = json.loads(bytes(said.payload))
        if name in fields:
            fields[name] = "5a" * 32
        elif name in fields.get("identity", ()):
            fields["identity"][name] = {"host": "elsewhere", "role": "server"}.get(name, 0)
        return dataclasses.replace(said, payload=json.dumps(fields).encode())

    @rule(side=sides, said=words)
    def tell(self, side, said):
        with contextlib.suppress(AuthenticationError, RemoteProtocolError, LocalProtocolError):
            side.receive(said)

    @property
    def convinced(self):
        return [side for side in self.all if side.established is not None]

    @invariant()
    def who_is_convinced_knows_the_other_side_as_it_is_and_has_its_keys(self):
        for number, side in enumerate(self.all):
            if (found := side.established) is None:
                continue
            other = self.all[found.peer.pid]
            assert found.peer == dataclasses.replace(SERVER if number % 2 == 0 else CLIENT, pid=found.peer.pid)
            assert other._preamble == side._preamble
            if number % 2 == 0:  # the client is convinced last
                assert other.established.peer.pid == number
                assert found.send.seal(b"header") == other.established.receive.seal(b"header")
                assert found.receive.seal(b"header") == other.established.send.seal(b"header")


TestSealedStream = SealedStream.TestCase
TestSealedStream.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)

TestHandshakes = Handshakes.TestCase
TestHandshakes.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
