"""Speed of llama.cpp on one GGUF file: a warm-up, then one JSON line of prefill and decode speed for each line on stdin."""
import ctypes, json, sys, tempfile, time

import llama_cpp
from llama_cpp import Llama

path, threads, prompt, decode = sys.argv[1], *map(int, sys.argv[2:5])
if sys.argv[5] == "f16":
    # A rung of floats is compared with floats: the same file, widened.
    wide = tempfile.NamedTemporaryFile(suffix=".gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize, params.ftype = True, llama_cpp.LLAMA_FTYPE_MOSTLY_F16
    assert llama_cpp.llama_model_quantize(path.encode(), wide.name.encode(), ctypes.byref(params)) == 0
    path = wide.name
model = Llama(path, n_ctx=prompt + decode + 64, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
ids = [(i * 7919) % 100_000 % model.n_vocab() for i in range(prompt)]


def run(decode):
    model.reset()
    start = time.perf_counter()
    model.eval(ids)
    middle = time.perf_counter()
    for _ in range(decode):
        model.eval([5])
    end = time.perf_counter()
    return {"prefill_tok_s": prompt / (middle - start), "decode_tok_s": decode / (end - middle) if decode else 0.0}


run(4)
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(run(decode)), flush=True)
