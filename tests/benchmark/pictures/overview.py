"""Pictures of who does what: the first one, for users, and that of processes, threads and the way of a batch."""

from __future__ import annotations

from .svg import BLUE, GREEN, ORANGE, Picture

_LOOP = ("for images, labels in loader:", "  loss = model(images, labels)", "  loss.backward()", "  optimizer.step()")
_BOLD = 'font-weight="600"'
_SMALL = 'font-size="13"'
_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
)
_BOTH = 'stroke-width="1.5" marker-start="url(#tip)" marker-end="url(#tip)"'
_FORK = 'stroke-width="1.5" stroke-dasharray="4 4" marker-end="url(#tip)"'


def draw_overview() -> Picture:
    text = (
        "The training loop runs on a GPU node. Workers on CPU nodes read, decode, augment and collate. The loader "
        "sends them indices over TCP, and receives batches, which the loop takes in the order of the sampler."
    )
    picture = Picture("A GPU node takes batches from workers on CPU nodes", text, 560, 288)
    picture.add(_TIP)
    picture.text(14, 24, "GPU node", more=_BOLD)
    picture.box(12, 34, 246, 244, more='rx="8"')
    picture.box(20, 42, 230, 116, "card")
    picture.text(28, 64, "train.py", look="soft")
    for number, line in enumerate(_LOOP):
        picture.text(28, 88 + 20 * number, line, look="ink code", more='font-size="12"')
    picture.box(20, 168, 230, 102, "card")
    picture.text(28, 192, "RPCDataloader", more=_BOLD)
    for number, line in enumerate(("samplers as in torch,", "batches in their order,", "pinned, or on the GPU")):
        picture.text(28, 214 + 20 * number, line, look="soft")
    picture.text(548, 24, "read, decode, augment", "end", "soft")
    for node in range(3):
        y = 34 + node * 86
        picture.box(352, y, 196, 72, more='rx="8"')
        picture.text(362, y + 22, f"CPU node {node + 1}", more=_BOLD)
        for worker in range(3):
            x = 362 + worker * 60
            picture.bar(x, y + 34, 56, 28, (BLUE, GREEN, ORANGE)[node], "a worker process")
            picture.add(
                f'<text x="{x + 28}" y="{y + 52}" text-anchor="middle" font-size="13" fill="#ffffff">worker</text>'
            )
        picture.line([(252, 218), (284, 218), (318, y + 36), (350, y + 36)], "wire", _BOTH)
    picture.text(306, 24, "TCP", "middle", more=_BOLD)
    picture.text(305, 262, "indices out", "middle", "soft")
    picture.text(305, 280, "batches in", "middle", "soft")
    return picture


def draw_processes() -> Picture:
    text = (
        "In the training process, the thread of the loop draws indices, sends them to a worker, and returns batches in "
        "order. A receiver per connection fills memory and makes tensors on it, and one sender sends what cannot be "
        "sent at once. On the node, the node server forks a gate for each new client, which becomes its session. The "
        "session builds the datasets, and forks a worker for each further connection."
    )
    picture = Picture("Processes, threads, and the way of a batch", text, 720, 372)
    picture.add(_TIP)
    picture.text(14, 24, "training machine", more=_BOLD)
    picture.box(12, 34, 270, 326, more='rx="8"')
    picture.text(24, 56, "training process, and its threads", look="soft")
    _describe(
        picture,
        22,
        66,
        250,
        "the loop, in next()",
        "1 draws indices from the sampler",
        "6 returns the batch in its turn",
    )
    _describe(
        picture,
        22,
        146,
        250,
        "a receiver per connection",
        "5 reads into (pinned) memory,",
        "   and makes tensors on it",
    )
    _describe(picture, 22, 226, 250, "one sender", "2 sends indices, where the loop", "   could not do that at once")
    _describe(picture, 22, 306, 250, "janitor, alarm, look-up")
    picture.text(438, 24, "CPU node, or the same machine", more=_BOLD)
    picture.box(436, 34, 272, 326, more='rx="8"')
    _describe(picture, 446, 66, 252, "node server", "listens and forks, runs no user code")
    _describe(picture, 446, 152, 252, "session, one per client", "builds the datasets, once")
    _describe(
        picture,
        446,
        238,
        252,
        "worker, one per connection",
        "3 fetches and collates",
        "4 sends it as it lies in memory",
    )
    picture.text(572, 334, "more workers", "middle", "soft")
    for y, name in (122, "fork, by a gate"), (208, "fork"):
        picture.line([(572, y), (572, y + 28)], "wire", _FORK)
        picture.text(582, y + 18, name, look="soft", more=_SMALL)
    picture.line([(284, 180), (444, 180)], "wire", _BOTH)
    picture.text(359, 170, "control connection", "middle", "soft", _SMALL)
    picture.line([(284, 270), (444, 270)], "wire", _BOTH)
    picture.text(359, 260, "a connection per", "middle", "soft", _SMALL)
    picture.text(359, 290, "worker, TCP or Unix", "middle", "soft", _SMALL)
    return picture


def _describe(picture: Picture, x: float, y: float, width: float, name: str, *lines: str) -> None:
    """A box with a name, and what that does."""
    picture.box(x, y, width, 32 + 18 * len(lines), "card")
    picture.text(x + 10, y + 21, name, more=_BOLD)
    for number, line in enumerate(lines):
        picture.text(x + 10, y + 41 + 18 * number, line, look="soft", more=f'{_SMALL} xml:space="preserve"')
