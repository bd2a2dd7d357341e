#!/usr/bin/env python3
"""The same shapes with PyTorch and transformers, to stand beside gpu_steps.py's.

usage: gpu_peers.py CONFIG_DIR [--context 512] [--prefill 8191] [--no-compiled]

Random weights in bfloat16 on one GPU. Prints milliseconds: a prefill (median of 3), a decode step of batch 1 eager with a growing
cache (median of 16), and one compiled with CUDA graphs and a static cache (median of 32).
"""
import argparse
import statistics
import time

import torch
import transformers


def timed(function, repeats):
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=int, default=8191)
    parser.add_argument("--no-compiled", action="store_true")
    args = parser.parse_args()
    config = transformers.AutoConfig.from_pretrained(args.config)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    print("torch %s, transformers %s" % (torch.__version__, transformers.__version__), flush=True)

    def ids(count):
        return torch.randint(1000, 100000, (1, count), device="cuda")

    prompt = ids(args.prefill)
    prefill = lambda: model(prompt, use_cache=True, logits_to_keep=1)
    prefill()
    print("prefill of %d: %.1f ms" % (args.prefill, timed(prefill, 3)), flush=True)

    cache = model(ids(args.context), use_cache=True, logits_to_keep=1).past_key_values
    token = ids(1)
    eager = lambda: model(token, past_key_values=cache, use_cache=True)
    for _ in range(4):
        eager()
    print("decode, batch 1, context %d, eager: %.2f ms" % (args.context, timed(eager, 16)), flush=True)
    if args.no_compiled:
        return

    cache = transformers.StaticCache(config=config, max_cache_len=args.context + 64)
    model(ids(args.context), past_key_values=cache, use_cache=True, logits_to_keep=1)
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    position = torch.tensor([args.context], device="cuda")
    step = lambda: compiled(token, past_key_values=cache, use_cache=True, cache_position=position,
                            position_ids=position[None])
    for _ in range(5):
        step()
    print("decode, batch 1, context %d, compiled: %.2f ms" % (args.context, timed(step, 32)), flush=True)


if __name__ == "__main__":
    main()
