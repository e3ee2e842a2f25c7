#!/usr/bin/env python3
"""Makes a big model that writes what a small one writes: more layers and a wider feed-forward part whose outputs are zero.

The weights that are added are random, read at every token and multiplied like all others; only their last product is zero.
So a test can have a model of any size whose text still means something.

    bulk.py SMALL.gguf BIG.gguf LAYERS FFN_WIDTH
"""

import array
import hashlib
import random
import struct
import sys

U32, STRING, ARRAY = 4, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, F16 = 0, 1
ALIGN = 32


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        value = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize("<" + form)
        return value

    def text(self):
        size = self.take("Q")
        self.at += size
        return self.data[self.at - size : self.at]

    def value(self, kind):
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner = self.take("I")
            return [self.value(inner) for _ in range(self.take("Q"))]
        return self.take(SCALARS[kind])


def text(value):
    return struct.pack("<Q", len(value)) + value


def random_halves(count, seed):
    """Small numbers with random signs and fractions, a block of which is repeated with a shift."""
    draw = random.Random(seed)
    block = array.array("H", (0x2000 | draw.randrange(0x400) | draw.choice((0, 0x8000)) for _ in range(4099)))
    repeated = block * (count // len(block) + 1)
    return repeated[:count]


def main(small, big, layers, ffn):
    data = open(small, "rb").read()
    reader = Reader(data)
    magic, version, tensors, keys = (reader.take(form) for form in "IIQQ")
    assert magic == 0x46554747 and version in (2, 3), "no GGUF file"
    pairs, numbers = [], {}
    for _ in range(keys):
        start, name = reader.at, reader.text()
        kind = reader.take("I")
        value = reader.value(kind)
        if kind == U32:
            numbers[name.decode().split(".", 1)[-1]] = value
        pairs.append((name, kind, value, data[start : reader.at]))
    entries = {}
    for _ in range(tensors):
        name = reader.text().decode()
        shape = [reader.take("Q") for _ in range(reader.take("I"))]
        entries[name] = (shape, reader.take("I"), reader.take("Q"))
    base = -(-reader.at // ALIGN) * ALIGN
    own_layers, own_ffn, width = numbers["block_count"], numbers["feed_forward_length"], numbers["embedding_length"]
    assert layers >= own_layers and ffn >= own_ffn and ffn % 32 == 0

    def stored(name):
        shape, kind, offset = entries[name]
        count = 1
        for side in shape:
            count *= side
        form, size = {F32: ("f", 4), F16: ("H", 2)}[kind]
        values = array.array(form)
        values.frombytes(data[base + offset : base + offset + count * size])
        return shape, kind, values

    out = []
    for name in entries:
        if not name.startswith("blk."):
            out.append((name, *stored(name)))
    parts = sorted(name.split(".", 2)[2] for name in entries if name.startswith("blk.0."))
    for layer in range(layers):
        for part in parts:
            mine = layer < own_layers
            shape, kind, values = stored(f"blk.{layer if mine else 0}.{part}")
            if not mine and part in ("attn_output.weight", "ffn_down.weight"):
                values = array.array("H", bytes(2 * len(values)))
            if part in ("ffn_gate.weight", "ffn_up.weight"):
                shape = [width, ffn]
                values = values + random_halves((ffn - own_ffn) * width, f"{layer} {part}")
            if part == "ffn_down.weight":
                shape, padding = [ffn, width], array.array("H", bytes(2 * (ffn - own_ffn)))
                rows = (values[row * own_ffn : (row + 1) * own_ffn] + padding for row in range(width))
                values = array.array("H", b"".join(row.tobytes() for row in rows))
            out.append((f"blk.{layer}.{part}", shape, kind, values))

    changed = {b"block_count": layers, b"feed_forward_length": ffn}
    head = struct.pack("<IIQQ", magic, version, len(out), keys)
    for name, kind, _, raw in pairs:
        new = changed.get(name.split(b".", 1)[-1])
        head += raw if new is None else text(name) + struct.pack("<II", kind, new)
    offset = 0
    for name, shape, kind, values in out:
        head += text(name.encode()) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", side) for side in shape)
        head += struct.pack("<IQ", kind, offset)
        offset += -(-len(values) * values.itemsize // ALIGN) * ALIGN
    digest = hashlib.sha256()
    with open(big, "wb") as file:

        def write(part):
            digest.update(part)
            file.write(part)
            rest = -len(part) % ALIGN
            digest.update(bytes(rest))
            file.write(bytes(rest))

        write(head)
        for _, _, _, values in out:
            write(values.tobytes())
        print(digest.hexdigest(), file.tell())


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
