#!/usr/bin/env python3
"""Soak: many mixed requests with disconnects against `lockstep serve` on CPU ranks; at the end everything is where it began.

usage: soak.py LOCKSTEP SOURCE_DIR [--requests N] [--clients C] [--ranks R] [--seed S] [--slack MIB]        standard library only

The null model is served (its answers follow from the prompt, so each is checked), with a KV pool far smaller than the clients
want: requests queue, are preempted and share prefixes. A request is a completion, streamed or not, of 1 to 3 choices; one in
three clients goes away: at once, while it waits, in the middle of the answer. Some bodies are broken. At the end no block is in
use, nothing runs or waits, no connection is open, and rank 0's memory is what it was after the first tenth, but for --slack,
which the allocator may keep.
"""
import argparse, asyncio, json, os, pathlib, random, sys, tempfile, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "launch"))
from serve_harness import Server, expected_ids, metric, parse_metrics

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 96,
          "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 320,
          "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
          "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}


class Outcome:
    def __init__(self):
        self.done = self.left = self.refused = self.busy = 0
        self.wrong = []


def draw_request(draw):
    """(body, expected ids)"""
    shared = [random.Random(draw.randrange(4)).randrange(320) for _ in range(64)]
    prompt = shared[:draw.randrange(1, 64)] + [draw.randrange(320) for _ in range(draw.randrange(20))]
    length = draw.choice([1, 3, 10, 30, 60, 200])
    body = {"model": "soak", "prompt": prompt, "max_tokens": length, "temperature": draw.choice([0, 0.7]),
            "stream": draw.random() < 0.6, "n": draw.choice([1, 1, 1, 2, 3])}
    return body, expected_ids(prompt, length)


def texts_of(body, text):
    """Ids of each choice, from a whole response."""
    answers = [""] * body["n"]
    if body["stream"]:
        events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
        assert events[-1] == "[DONE]", events[-1:]
        chunks = [json.loads(event) for event in events[:-1]]
    else:
        chunks = [json.loads(text)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            answers[choice["index"]] += choice["text"]
    return [[int(id) for id in answer.split()] for answer in answers]


async def talk(port, data, stays, draw, timeout=120):
    """The response as (status, body), or None when the client has left before its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        if not stays:
            await asyncio.sleep(draw.choice([0, 0.001, 0.02, 0.1]))
            await reader.read(draw.choice([1, 400])) if draw.random() < 0.5 else None
            return None
        response = await asyncio.wait_for(reader.read(), timeout)
    finally:
        writer.close()
        if not stays and draw.random() < 0.5:
            writer.transport.abort()  # a reset in place of an orderly end
    head, _, body = response.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[:int(size, 16)], rest[int(size, 16) + 2:]
    return int(head.split()[1]), body.decode()


async def one_request(port, draw, outcome):
    body, expected = draw_request(draw)
    data = json.dumps(body).encode()
    broken = draw.random() < 0.03
    if broken:
        data = draw.choice([data[:-5], b"[]", b"{}", data.replace(b'"max_tokens": ', b'"max_tokens": -')])
    answer = await talk(port, data, draw.random() >= 1 / 3, draw)
    if answer is None:
        outcome.left += 1
        return
    status, text = answer
    if broken:
        outcome.refused += 1
        if status != 400:
            outcome.wrong.append(f"a broken body got {status}")
    elif status in (429, 503):
        outcome.busy += 1
        await asyncio.sleep(0.05)
    elif status != 200:
        outcome.wrong.append(f"{status}: {text[:200]}")
    else:
        outcome.done += 1
        if any(ids != expected for ids in texts_of(body, text)):
            outcome.wrong.append(f"{body}: {text[:300]}")


async def run(port, count, clients, seed, outcome):
    numbers = iter(range(count))

    async def client():
        for number in numbers:
            await one_request(port, random.Random(f"{seed} {number}"), outcome)

    await asyncio.gather(*(client() for _ in range(clients)))


def settled(server):
    """The metrics, once nothing is left of any request."""
    end = time.monotonic() + 5
    while True:
        samples = server.metrics()
        left = {name: metric(samples, "lockstep:" + name) for name in
                ("num_requests_running", "num_requests_waiting", "kv_cache_used_blocks", "http_requests_open")}
        if not any(left.values()):
            return samples
        assert time.monotonic() < end, f"still there 5 s after the last request: {left}"
        time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lockstep")
    parser.add_argument("source")
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slack", type=int, default=16)
    args = parser.parse_args()
    outcome, start = Outcome(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        with Server(os.path.abspath(args.lockstep), pathlib.Path(args.source).resolve(), folder, "--served-model-name", "soak",
                    "--num-gpu-blocks-override", 64, "--max-num-seqs", 24, "--max-num-batched-tokens", 256, "--max-queue", 64,
                    ranks=args.ranks) as server:
            asyncio.run(run(server.port, args.requests // 10, args.clients, f"{args.seed} first", outcome))
            memory = metric(settled(server), "process_resident_memory_bytes")
            asyncio.run(run(server.port, args.requests - args.requests // 10, args.clients, args.seed, outcome))
            samples = settled(server)
            grown = metric(samples, "process_resident_memory_bytes") - memory
            preempted = metric(samples, "lockstep:num_preemptions_total")
            hits = metric(samples, "lockstep:prefix_cache_hits_total")
            os.kill(server.rank(0), 15)
            status = server.wait_ended()
    print(f"{args.requests} requests by {args.clients} clients on {args.ranks} ranks in {time.monotonic() - start:.1f} s: "
          f"{outcome.done} answered and right, {outcome.left} left, {outcome.refused} refused, {outcome.busy} too many; "
          f"{preempted:.0f} preemptions, {hits:.0f} tokens of prefix hits; memory {grown / (1 << 20):+.1f} MiB; exit {status}")
    assert not outcome.wrong, f"{len(outcome.wrong)} wrong, the first: {outcome.wrong[0]}"
    assert outcome.done > args.requests / 3 and outcome.left > args.requests / 5, "the mix is not what it is meant to be"
    assert preempted > 0 and hits > 0, "the pool was not short, or no prefix was shared"
    assert grown < args.slack << 20, f"rank 0 has grown by {grown / (1 << 20):.1f} MiB"
    assert status == 0, f"exit status {status}"


main()
