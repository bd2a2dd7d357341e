#!/usr/bin/env python3
"""Times whole steps of the program on GPUs: scheduler, plan, forward pass, sampler.

usage: gpu_steps.py LOCKSTEP CONFIG_DIR [--ranks 1,2] [--cases 1x512,8x512,32x1024,256x1024,prefill8191] [--http] [OPTION...]

CONFIG_DIR holds a config.json; the weights are dummy ones. A case is BATCHxCONTEXT (decode: the median step of 48 with the whole
batch and no prompt in it) or prefillN (prompts of N tokens, one after the other: the median of 4
steps of N tokens or, where the next prompt begins in them, up to 8192). OPTIONs go to `lockstep generate`: --overlap-sums 0 makes
no sum over ranks beside products, --sum-multiprocessors N gives those N multiprocessors. --http: the same prompts to `lockstep
serve`, each streamed to a client of its own. Prints a line a case: median, 10th and 90th percentile, in milliseconds.
"""
import argparse
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading

DECODE_STEPS = 48


def command_of(args, ranks, name, log, options):
    return ["mpirun", "--allow-run-as-root", "-np", str(ranks), "--bind-to", "none", args.lockstep, name, args.config,
            "--load-format", "dummy", "--device", "cuda", "--max-model-len", "16384", "--max-num-batched-tokens", "8192",
            "--no-enable-prefix-caching", "--step-log", log] + options


def ask(port, prompt, max_tokens, failures):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200 or b"[DONE]" not in text:
        failures.append("HTTP %d: %s" % (answer.status, text[-500:]))


def serve(args, ranks, prompts, max_tokens, options, folder):
    log = os.path.join(folder, "steps.jsonl")
    command = command_of(args, ranks, "serve", log, ["--port", "0", "--served-model-name", "m"] + options)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said, port = "", None
    for line in server.stderr:
        said += line
        if found := re.search(r"serving .* on http://\S+:(\d+)", line):
            port = int(found[1])
            break
    if port is None:
        sys.exit("%s\n%s" % (" ".join(command), said[-2000:]))
    threading.Thread(target=server.stderr.read, daemon=True).start()
    failures = []
    clients = [threading.Thread(target=ask, args=(port, prompt, max_tokens, failures)) for prompt in prompts]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    server.send_signal(signal.SIGUSR2)  # mpirun passes it on: drain and end
    server.wait(60)
    if failures:
        sys.exit(failures[0])
    with open(log) as file:
        return [json.loads(line) for line in file], said


def run(args, ranks, prompts, max_tokens, options, folder):
    if args.http:
        return serve(args, ranks, prompts, max_tokens + 32, options, folder)  # they do not come at the same moment
    path, log = os.path.join(folder, "prompts.jsonl"), os.path.join(folder, "steps.jsonl")
    with open(path, "w") as file:
        for prompt in prompts:
            file.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens}) + "\n")
    command = command_of(args, ranks, "generate", log,
                         ["--prompts", path, "--ignore-eos", "--temperature", "0", "--json"] + options)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit("%s\nexit status %d\n%s" % (" ".join(command), done.returncode, done.stderr[-2000:]))
    with open(log) as file:
        return [json.loads(line) for line in file], done.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lockstep")
    parser.add_argument("config")
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--cases", default="1x512,8x512,32x1024,256x1024,prefill8191")
    parser.add_argument("--http", action="store_true", help="through the server")
    parser.add_argument("--stderr", action="store_true", help="show what the program says, too")
    args, options = parser.parse_known_args()
    generator = random.Random(1)
    for ranks in (int(n) for n in args.ranks.split(",")):
        for case in args.cases.split(","):
            with tempfile.TemporaryDirectory() as folder:
                if case.startswith("prefill"):
                    length = int(case[len("prefill"):])
                    prompts = [[generator.randrange(1000, 100000) for _ in range(length)] for _ in range(5)]
                    steps, said = run(args, ranks, prompts, 1, options, folder)
                    times = [s["seconds"] for s in steps if s["prompt_tokens"] >= length][1:]
                else:
                    batch, context = (int(n) for n in case.split("x"))
                    prompts = [[generator.randrange(1000, 100000) for _ in range(context - DECODE_STEPS // 2)] for _ in range(batch)]
                    steps, said = run(args, ranks, prompts, DECODE_STEPS + batch * context // 8192 + 2, options, folder)
                    times = [s["seconds"] for s in steps if s["prompt_tokens"] == 0 and s["tokens"] == batch][2:]
            times = sorted(1e3 * t for t in times)
            if not times:
                print("%d GPUs, %s: no step of this kind" % (ranks, case))
                continue
            print("%d GPUs, %-12s %8.3f ms  (%.3f to %.3f, %d steps)" %
                  (ranks, case, statistics.median(times), times[len(times) // 10], times[len(times) * 9 // 10], len(times)), flush=True)
            if args.stderr:
                print(said, flush=True)


if __name__ == "__main__":
    main()
