#!/usr/bin/env python3
"""Writes the seeds that no editor can: model files, bridges and kept state of a few hundred bytes. Needs nothing but Python.

A seed that begins with `good` must be taken, one that begins with `bad` be refused; `molt-runtime/tests/hostile.rs` holds
them to it. The seeds that are text were written by hand.
"""
import hashlib
import json
import struct
import zlib
from pathlib import Path

HERE = Path(__file__).parent / "corpus"
HUGE = 1 << 60
U8, U32, F32, TEXT, LIST, U64 = 0, 4, 6, 8, 9, 10


def text(value):
    value = value.encode()
    return struct.pack("<Q", len(value)) + value


def value(kind, content):
    if kind == TEXT:
        return text(content)
    if kind == LIST:
        of, items = content
        return struct.pack("<IQ", of, len(items)) + b"".join(value(of, item) for item in items)
    return struct.pack({U8: "<B", U32: "<I", F32: "<f", U64: "<Q"}[kind], content)


TOKENS = ["a", "b", "e", "h", "Ġ", "t", "he", "<|im_end|>"]


def keys(family="qwen2", width=4):
    return {
        "general.architecture": (TEXT, family),
        f"{family}.block_count": (U32, 1),
        f"{family}.embedding_length": (U32, width),
        f"{family}.attention.head_count": (U32, 2),
        f"{family}.attention.head_count_kv": (U32, 1),
        f"{family}.feed_forward_length": (U32, width),
        f"{family}.context_length": (U32, 64),
        f"{family}.attention.layer_norm_rms_epsilon": (F32, 1e-6),
        "tokenizer.ggml.model": (TEXT, "gpt2"),
        "tokenizer.ggml.pre": (TEXT, "qwen2"),
        "tokenizer.ggml.tokens": (LIST, (TEXT, TOKENS)),
        "tokenizer.ggml.merges": (LIST, (TEXT, ["h e"])),
        "tokenizer.ggml.token_type": (LIST, (U32, [1] * 7 + [3])),
        "tokenizer.ggml.eos_token_id": (U32, 7),
        "tokenizer.chat_template": (TEXT, "{% for m in messages %}{{ m.content }}{% endfor %}"),
    }


def shapes(width=4):
    half = width // 2
    return {
        "token_embd.weight": (len(TOKENS), width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.attn_q.weight": (width, width),
        "blk.0.attn_k.weight": (half, width),
        "blk.0.attn_v.weight": (half, width),
        "blk.0.attn_output.weight": (width, width),
        "blk.0.ffn_gate.weight": (width, width),
        "blk.0.ffn_up.weight": (width, width),
        "blk.0.ffn_down.weight": (width, width),
    }


# The number of a format, and the bytes of so many numbers.
FORMATS = {"f32": (0, lambda n: 4 * n), "f16": (1, lambda n: 2 * n), "q8_0": (8, lambda n: n // 32 * 34)}


def gguf(values, tensors, form="f32", lie=lambda name, dims, offset: (dims, offset), alignment=32, data=True):
    number, size = FORMATS[form]
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, (kind, content) in values.items():
        out += text(key) + struct.pack("<I", kind) + value(kind, content)
    offset, body = 0, b""
    for name, dims in tensors.items():
        count = dims[0] * (dims[1] if len(dims) > 1 else 1)
        vector = len(dims) == 1
        told, at = lie(name, dims, offset)
        out += text(name) + struct.pack("<I", len(told)) + b"".join(struct.pack("<Q", d) for d in reversed(told))
        out += struct.pack("<IQ", 0 if vector else number, at)
        taken = -(-(4 * count if vector else size(count)) // alignment) * alignment
        body += bytes(taken)
        offset += taken
    out += bytes(-len(out) % alignment)
    return out + (body if data else b"")


def lying(which, dims=None, offset=None):
    def lie(name, own, at):
        return (dims or own, at if offset is None else offset) if name == which else (own, at)
    return lie


def ggufs():
    plain = keys()
    yield "good-qwen2", gguf(plain, shapes())
    yield "good-llama-f16", gguf(keys("llama"), shapes(), "f16")
    yield "good-q8", gguf(keys(width=32), shapes(32), "q8_0")
    both = shapes()
    both["output.weight"] = both["token_embd.weight"]
    yield "good-two-tables", gguf(plain, both)
    yield "bad-no-tensors", gguf(plain, {})
    yield "bad-nothing-behind", gguf(plain, shapes(), data=False)
    yield "bad-overlapping", gguf(plain, shapes(), lie=lying("blk.0.ffn_up.weight", offset=0))
    yield "bad-rows", gguf(plain, shapes(), lie=lying("token_embd.weight", (HUGE, 4)))
    yield "bad-rows-of-nothing", gguf(plain, shapes(), lie=lying("token_embd.weight", (HUGE, 0)))
    yield "bad-offset", gguf(plain, shapes(), lie=lying("blk.0.attn_q.weight", offset=2**64 - 8))
    yield "bad-five-dimensions", gguf(plain, shapes(), lie=lying("blk.0.attn_q.weight", (1, 1, 1, 4, 4)))
    yield "bad-no-alignment", gguf({**plain, "general.alignment": (U8, 0)}, shapes())
    yield "bad-alignment", gguf({**plain, "general.alignment": (U64, HUGE)}, shapes())
    yield "bad-layers", gguf({**plain, "qwen2.block_count": (U64, HUGE)}, shapes())
    yield "bad-heads", gguf({**plain, "qwen2.attention.head_count": (U64, HUGE)}, shapes())
    nested = (U32, [1])
    for _ in range(40):
        nested = (LIST, [nested])
    yield "bad-lists-in-lists", gguf({**plain, "general.tags": (LIST, nested)}, shapes())
    counts = gguf(plain, shapes())
    yield "bad-count-of-keys", counts[:16] + struct.pack("<Q", HUGE) + counts[24:]
    yield "bad-count-of-tensors", counts[:8] + struct.pack("<Q", HUGE) + counts[16:]
    long = text("qwen2")
    yield "bad-length-of-text", counts.replace(long, struct.pack("<Q", HUGE) + b"qwen2", 1)
    listed = struct.pack("<IQ", TEXT, len(TOKENS))
    yield "bad-length-of-list", counts.replace(listed, struct.pack("<IQ", TEXT, HUGE), 1)


def safetensors(tensors, metadata=None):
    """`tensors`: name to dtype, shape, bytes."""
    header, body = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (kind, shape, content) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + body


HUB = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def hub(config=None, tokenizer=None, tensors=None, weights=None):
    settings = {
        "model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 4, "vocab_size": 8, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "eos_token_id": 7, **(config or {}),
    }
    words = tokenizer or {
        "model": {"vocab": {t: i for i, t in enumerate(TOKENS[:7])}, "merges": ["h e"]},
        "added_tokens": [{"id": 7, "content": TOKENS[7], "special": True}],
        "pre_tokenizer": {"type": "ByteLevel"},
    }
    own = {}
    for name, dims in shapes().items():
        parts = name.split(".")
        own_name = HUB[parts[-2]] + ".weight"
        own_name = f"model.layers.0.{own_name}" if len(parts) > 2 else own_name
        own[own_name] = ("F32", list(dims), bytes(4 * dims[0] * (dims[1] if len(dims) > 1 else 1)))
    own.update(tensors or {})
    parts = [json.dumps(settings), json.dumps(words, ensure_ascii=False)]
    return b"\n====\n".join([part.encode() for part in parts] + [weights or safetensors(own)])


def hubs():
    yield "good-qwen2", hub()
    yield "good-pairs", hub(tokenizer={
        "model": {"vocab": {t: i for i, t in enumerate(TOKENS)}, "merges": [["h", "e"]]},
        "pre_tokenizer": {"pattern": "|\\p{N}|"},
    })
    yield "bad-vocabulary", hub({"vocab_size": HUGE})
    yield "bad-vocabulary-within-bounds", hub({"vocab_size": 1 << 24})
    yield "bad-width", hub({"hidden_size": HUGE})
    yield "bad-no-heads", hub({"num_attention_heads": 0})
    yield "bad-token-id", hub(tokenizer={
        "model": {"vocab": {"a": 2**32 - 1}, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"},
    })
    yield "bad-rows-of-nothing", hub({"vocab_size": HUGE}, tensors={"model.embed_tokens.weight": ("F32", [HUGE, 0], b"")})
    yield "bad-overflow", hub(tensors={"model.norm.weight": ("F32", [HUGE, HUGE], bytes(16))})
    yield "bad-header-length", hub(weights=struct.pack("<Q", HUGE) + b"{}")
    yield "bad-no-weights", hub(weights=b"\0")
    over = safetensors({"a": ("F32", [2], bytes(8)), "b": ("F32", [2], bytes(8))}).replace(b"[8,16]", b"[4,12]")
    yield "bad-overlapping", hub(weights=over)


def bridge(change=None, spare=None, residuals=None):
    spec = {
        "format": "molt-bridge-1", "source": "s", "destination": "d",
        "source_shape": {"layers": 2, "kv_heads": 1, "head_dim": 2},
        "destination_shape": {"layers": 2, "kv_heads": 1, "head_dim": 2},
        "destination_width": 4, "native_layers": 1, "window": 1, "calibration_tokens": 9, "residuals": residuals or [],
    }
    spec.update(change or {})
    # One source layer feeds the mapped one: 4 of keys and values, 4 of hidden state, padded to one block of 32.
    tensors = {
        "mean": ("F32", [12], bytes(48)), "inverse_scale": ("F32", [12], bytes(48)),
        "blk.1.weight": ("U8", [4, 34], bytes(4 * 34)), "blk.1.bias": ("F32", [4], bytes(16)),
    }
    tensors.update(spare or {})
    frame = json.dumps(spec, separators=(",", ":"))
    digest = hashlib.sha256(frame.encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name][2])
    return safetensors(tensors, {"bridge": frame, "digest": digest.hexdigest()})


def bridges():
    shape = {"layers": 2, "kv_heads": 1, "head_dim": 2}
    yield "good", bridge()
    yield "good-residuals", bridge(residuals=[{"layer": 1, "keys": 0.5, "values": 0.25}])
    yield "bad-window", bridge({"window": HUGE})
    yield "bad-even-window", bridge({"window": 2})
    yield "bad-layers", bridge({"source_shape": {**shape, "layers": HUGE}})
    yield "bad-most", bridge({
        "source_shape": {"layers": 4096, "kv_heads": 4096, "head_dim": 4096},
        "destination_shape": {"layers": 4096, "kv_heads": 4096, "head_dim": 4096},
        "destination_width": 65536, "native_layers": 4095, "window": 4095,
    })
    yield "bad-no-layers", bridge({"destination_shape": {**shape, "layers": 0}})
    yield "bad-all-native", bridge({"native_layers": 2})
    yield "bad-format", bridge({"format": "molt-bridge-9"})
    yield "bad-number", bridge(spare={"mean": ("F32", [12], struct.pack("<f", float("nan")) + bytes(44))})
    yield "bad-weight", bridge(spare={"blk.1.weight": ("U8", [4, 8], bytes(32))})
    yield "bad-length", struct.pack("<Q", HUGE) + b"{}"
    yield "bad-overlapping", bridge().replace(b"[0,48]", b"[0,44]", 1)


def summed(part, content):
    return content + struct.pack("<I", zlib.crc32(struct.pack("<Q", part) + content))


def record(change=None, slots=None, planes=None, magic=b"MOLTKV\0\1"):
    """A cache of one layer with one head of two numbers, in f16."""
    slots = [(5, 0, 0), (6, 1, 0), (7, 3, 2)] if slots is None else slots
    head = {"source": "abc", "layers": 1, "kv_heads": 1, "head_dim": 2, "precision": "f16", "slots": len(slots),
            "next_position": 4}
    head.update(change or {})
    head = json.dumps(head, separators=(",", ":")).encode()
    told = b"".join(struct.pack("<IIB", *slot) for slot in slots)
    planes = [bytes(range(4 * len(slots)))] * 2 if planes is None else planes
    return (magic + struct.pack("<I", len(head)) + summed(0, head) + summed(1, told)
            + b"".join(summed(2 + at, plane) for at, plane in enumerate(planes)))


def records():
    yield "good", record()
    yield "good-f32", record({"precision": "f32"}, planes=[bytes(24)] * 2)
    yield "good-one-token", record({"next_position": 1}, [(5, 0, 1)])
    yield "bad-empty", b""
    yield "bad-cut-off", record()[:-5]
    yield "bad-longer", record() + b"\0"
    yield "bad-magic", record(magic=b"MOLTKV\0\2")
    yield "bad-head", record({"colour": "green"})
    yield "bad-head-length", b"MOLTKV\0\1" + struct.pack("<I", 0xffffffff)
    yield "bad-slots", record({"slots": HUGE})
    yield "bad-layers", record({"layers": HUGE})
    yield "bad-width", record({"kv_heads": 1 << 32, "head_dim": 1 << 32})
    yield "bad-no-width", record({"head_dim": 0}, planes=[b"", b""])
    yield "bad-no-layers", record({"layers": 0}, planes=[])
    yield "bad-nothing", record({"slots": 0}, [], [b"", b""])
    yield "bad-order", record(slots=[(5, 1, 0), (6, 1, 0), (7, 3, 0)])
    yield "bad-future", record({"next_position": 3})
    yield "bad-provenance", record(slots=[(5, 0, 0), (6, 1, 3), (7, 3, 0)])
    # Every token has its place in the books of a conversation that long.
    yield "bad-positions", record({"next_position": 0xffffffff}, [(5, 0, 0), (6, 1, 0), (7, 0xffffffff, 0)])


def journal(change=None, tokens=(4, 5, 6), ended=False, magic=b"MOLTAN\0\1", head=None):
    told = {"id": "case", "created": 1, "owner": {"token": None, "user": 7}, "sources": ["abc"], "kind": "chat",
            "include_usage": False, "tools": False, "prompt": [1, 2, 3], "pinned": 0, "answer": 9,
            "sampling": {"temperature": 0.5, "seed": 1}, "stop": ["END"], "grammar": None, "likelihoods": None}
    told.update(change or {})
    head = json.dumps(told, separators=(",", ":")).encode() if head is None else head
    seed = zlib.crc32(head)
    out = magic + struct.pack("<II", len(head), seed) + head
    for at, number in enumerate([*tokens, *([0xffffffff] if ended else [])]):
        entry = struct.pack("<II", at, number)
        out += struct.pack("<II", number, zlib.crc32(entry, seed))
    return out


def journals():
    yield "good", journal()
    yield "good-ended", journal(ended=True)
    yield "good-empty", journal(tokens=())
    yield "good-torn", journal()[:-3]
    yield "good-zeros", journal()[:-8] + bytes(64)
    yield "good-schema", journal({"grammar": {"json_schema": {"type": "object"}}, "owner": {"token": "ab", "user": None}})
    yield "bad-empty", b""
    yield "bad-cut-off", journal()[:99]
    yield "bad-magic", journal(magic=b"MOLTAN\0\2")
    yield "bad-length", b"MOLTAN\0\1" + struct.pack("<II", 0xffffffff, 0)
    yield "bad-name", journal({"id": "other"})
    yield "bad-path", journal({"id": "../case"})
    yield "bad-models", journal({"sources": ["xyz"]})
    yield "bad-field", journal({"colour": "green"})
    yield "bad-token", journal({"prompt": [1 << 40]})
    yield "bad-deep", journal(head=b'{"grammar":' + b"[" * 400)


SEEDS = {"gguf": ggufs, "safetensors": hubs, "bridge": bridges, "record": records, "journal": journals}
for folder, seeds in SEEDS.items():
    (HERE / folder).mkdir(exist_ok=True)
    for name, content in seeds():
        (HERE / folder / name).write_bytes(content)
