"""The first picture: a GPU node with its loop, CPU nodes with workers, and the wire between them."""

from __future__ import annotations

from .svg import BLUE, GREEN, ORANGE, Picture

_LOOP = ("for images, labels in loader:", "  loss = model(images, labels)", "  loss.backward()", "  optimizer.step()")
_BOLD = 'font-weight="600"'


def draw_overview() -> Picture:
    text = (
        "The training loop runs on a GPU node. Workers on CPU nodes read, decode, augment and collate. The loader "
        "sends them indices over TCP, and receives batches, which the loop takes in the order of the sampler."
    )
    picture = Picture("A GPU node takes batches from workers on CPU nodes", text, 560, 288)
    picture.add(
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
    )
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
        both = 'stroke-width="1.5" marker-start="url(#tip)" marker-end="url(#tip)"'
        picture.line([(252, 218), (284, 218), (318, y + 36), (350, y + 36)], "wire", both)
    picture.text(306, 24, "TCP", "middle", more=_BOLD)
    picture.text(305, 262, "indices out", "middle", "soft")
    picture.text(305, 280, "batches in", "middle", "soft")
    return picture
