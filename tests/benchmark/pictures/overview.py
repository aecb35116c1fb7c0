"""The first picture: a GPU node with its loop, CPU nodes with workers, and the wire between them."""

from __future__ import annotations

from .svg import BLUE, GREEN, ORANGE, Picture

_LOOP = ("for images, labels in loader:", "  loss = model(images, labels)", "  loss.backward()", "  optimizer.step()")


def draw_overview() -> Picture:
    text = (
        "The training loop runs on a GPU node. Workers on CPU nodes read, decode, augment and collate. The loader "
        "sends them indices over TCP, and receives batches, which the loop takes in the order of the sampler."
    )
    picture = Picture("A GPU node takes batches from workers on CPU nodes", text, 700, 300)
    picture.add(
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
    )
    picture.box(16, 34, 288, 250, more='rx="8"')
    picture.text(28, 24, "GPU node", more='font-weight="600"')
    picture.box(28, 46, 264, 118, "card")
    picture.text(40, 68, "train.py", look="soft")
    for number, line in enumerate(_LOOP):
        picture.text(40, 92 + 20 * number, line, look="ink code", more='font-size="12.5"')
    picture.box(28, 178, 264, 94, "card")
    picture.text(40, 200, "RPCDataloader", more='font-weight="600"')
    picture.text(40, 222, "samplers and shuffling as in torch,", look="soft")
    picture.text(40, 241, "batches in their order,", look="soft")
    picture.text(40, 260, "in pinned memory or on the GPU", look="soft")
    picture.text(424, 24, "CPU nodes", more='font-weight="600"')
    picture.text(684, 24, "read, decode, augment", "end", "soft", 'font-size="12.5"')
    for node in range(3):
        y = 34 + node * 88
        picture.box(424, y, 260, 74, more='rx="8"')
        picture.text(436, y + 22, f"node{node + 1:02}:6543", look="soft")
        for worker in range(4):
            x = 436 + worker * 60
            picture.bar(x, y + 36, 54, 26, (BLUE, GREEN, ORANGE)[node], "a worker process")
            picture.add(
                f'<text x="{x + 27}" y="{y + 53}" text-anchor="middle" font-size="12" fill="#ffffff">worker</text>'
            )
        both = 'stroke-width="1.5" marker-start="url(#tip)" marker-end="url(#tip)"'
        picture.line([(294, 225), (350, 225), (382, y + 37), (422, y + 37)], "wire", both)
    picture.text(365, 24, "TCP", "middle", more='font-weight="600"')
    picture.text(352, 262, "indices out,", "middle", "soft", 'font-size="12.5"')
    picture.text(352, 279, "batches in", "middle", "soft", 'font-size="12.5"')
    return picture
