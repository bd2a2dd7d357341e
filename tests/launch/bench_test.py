#!/usr/bin/env python3
"""`lockstep bench` from outside: that its numbers agree with each other, never that they are fast.

usage: bench_test.py LOCKSTEP SOURCE_DIR [CLASS...]
"""
import http.server, json, os, resource, signal, subprocess, threading, unittest.mock

from command_harness import LOCKSTEP, SOURCE, Commands, lockstep, main, write_tokenizer
from serve_harness import Server

NULL = ["--load-format", "null", "--device", "cpu"]
DUMMY = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]


class Bench(Commands):
    def bench(self, kind, *args, ranks=None, status=0, **options):
        """The JSON object that it prints."""
        result = lockstep("bench", kind, *args, "--json", ranks=ranks, **options)
        self.assertEqual(result.status, status, result.err)
        lines = result.json_lines()
        self.assertEqual(len(lines), 1)
        return lines[0]

    def check_statistics(self, s, count):
        self.assertEqual(s["count"], count)
        self.assertGreater(s["min"], 0)
        self.assertGreaterEqual(s["std"], 0)
        tiny = 1e-9 * s["max"]
        for name in ("mean", "median", "p90", "p99"):
            self.assertTrue(s["min"] - tiny <= s[name] <= s["max"] + tiny, (name, s))
        self.assertTrue(s["median"] <= s["p90"] + tiny and s["p90"] <= s["p99"] + tiny, s)

    def write_lines(self, *lines):
        path = self.folder / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    def check_result(self, r, unsent=0):
        """What must hold whatever the server did; `unsent` requests were given up before they were sent."""
        self.assertEqual(r["completed"] + r["failed"], r["num_prompts"])
        self.assertAlmostEqual(r["duration"] * r["request_throughput"], r["completed"], places=6)
        self.assertAlmostEqual(r["duration"] * r["output_throughput"], r["total_output_tokens"], places=6)
        self.assertAlmostEqual(r["duration"] * r["total_token_throughput"], r["total_input_tokens"] + r["total_output_tokens"], places=6)
        self.assertEqual(r["send_lateness_ms"]["count"], r["num_prompts"] - unsent)
        self.assertGreaterEqual(r["send_lateness_ms"]["min"], 0)
        for metric in ("ttft", "tpot", "itl", "e2el"):
            if r.get(f"mean_{metric}_ms") is not None:
                self.assertLessEqual(r[f"median_{metric}_ms"], r[f"p90_{metric}_ms"])
                self.assertLessEqual(r[f"p90_{metric}_ms"], r[f"p99_{metric}_ms"])
        if "errors" in r:
            for name in ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "arrival_times", "send_times"):
                self.assertEqual(len(r[name]), r["num_prompts"], name)
            self.assertEqual(sum(1 for e in r["errors"] if e), r["failed"])
            self.assertEqual(sum(r["output_lens"]), r["total_output_tokens"])
            self.assertEqual(r["arrival_times"], sorted(r["arrival_times"]))
            self.assertEqual(r["send_times"].count(None), unsent)
            for arrival, sent in zip(r["arrival_times"], r["send_times"]):
                self.assertTrue(sent is None or arrival <= sent)

    def load(self, url, *args, status=0, **options):
        r = self.bench("serve", "--base-url", url, *args, status=status, **options)
        self.check_result(r)
        return r


class BenchLatencyTest(Bench):
    def test_numbers_agree(self):
        for ranks in (1, 2):
            r = self.bench("latency", self.model, *DUMMY, "--batch-size", 3, "--input-len", 20, "--output-len", 6,
                           "--warmup", 1, "--repeats", 4, ranks=ranks)
            self.assertEqual((r["kind"], r["num_ranks"], r["device"], r["dtype"]), ("latency", ranks, "cpu", "float32"))
            self.assertEqual((r["batch_size"], r["input_len"], r["output_len"], r["repeats"]), (3, 20, 6, 4))
            self.assertEqual((r["num_requests"], r["total_input_tokens"], r["total_output_tokens"]), (12, 240, 72))
            for name, count in {"ttft_ms": 12, "tpot_ms": 12, "prefill_ms": 4, "decode_ms": 4, "e2e_ms": 4, "step_ms": 4 * 5,
                                "prefill_tokens_per_second": 4, "decode_tokens_per_second": 4}.items():
                self.check_statistics(r[name], count)
            self.assertAlmostEqual(r["prefill_ms"]["mean"] + r["decode_ms"]["mean"], r["e2e_ms"]["mean"], places=6)
            self.assertLessEqual(r["ttft_ms"]["max"], r["prefill_ms"]["max"])
            self.assertLessEqual(r["prefill_ms"]["max"], r["e2e_ms"]["max"])
            # Steps begin with the last of the first tokens, the decode with the first token of the last request: at most then.
            self.assertLessEqual(r["step_ms"]["mean"] * 5, r["decode_ms"]["mean"] * (1 + 1e-9))
            self.assertEqual(r["preemptions"], 0)

    def test_one_rank_of_more(self):
        r = self.bench("latency", self.model, *DUMMY, "--emulate-tp", 3, "--rank", 2, "--output-len", 4, "--repeats", 2)
        self.assertEqual((r["num_ranks"], r["emulated"]), (1, {"tp_size": 3, "rank": 2}))
        self.check_statistics(r["step_ms"], 6)
        r = self.bench("throughput", self.model, *DUMMY, "--emulate-tp", 2, "--num-prompts", 3, "--input-len", 8, "--output-len", 4)
        self.assertEqual(r["emulated"], {"tp_size": 2, "rank": 0})
        table = lockstep("bench", "latency", self.model, *DUMMY, "--emulate-tp", 2, "--rank", 1, "--output-len", 4, "--repeats", 1)
        self.assertIn("emulates rank 1 of 2", table.out.decode())
        run = lambda *args, **options: lockstep("bench", "latency", self.model, *args, **options)
        self.assert_refused(run(*DUMMY, "--emulate-tp", 2, ranks=2), "--emulate-tp 2", "2 were started")
        self.assert_refused(run(*DUMMY, "--emulate-tp", 2, "--rank", 2), "--rank 2", "0 to 1")
        self.assert_refused(run(*DUMMY, "--rank", 1), "--rank needs --emulate-tp")
        self.assert_refused(run(*DUMMY, "--emulate-tp", 999), "999", "query heads")
        self.assert_refused(run(*NULL, "--emulate-tp", 2), "--emulate-tp", "null")
        self.assert_refused(run(*DUMMY, "--emulate-tp", 2, "--check-tp", 1), "--check-tp", "--emulate-tp")

    def test_one_token_has_no_decode(self):
        r = self.bench("latency", self.model, *NULL, "--output-len", 1, "--repeats", 2, "--warmup", 0)
        for name in ("decode_ms", "step_ms", "tpot_ms", "decode_tokens_per_second"):
            self.assertEqual(r[name], {"count": 0, **dict.fromkeys(("mean", "median", "std", "p90", "p99", "min", "max"))})
        self.assertEqual(r["total_output_tokens"], 16)
        self.check_statistics(r["e2e_ms"], 2)

    def test_prompts_in_chunks(self):
        # Requests of the first chunks decode beside the prompts of the others.
        r = self.bench("latency", self.model, *NULL, "--max-num-batched-tokens", 16, "--batch-size", 4, "--input-len", 24,
                       "--output-len", 30, "--repeats", 2, "--warmup", 0)
        self.assertEqual(r["total_output_tokens"], 240)
        self.check_statistics(r["ttft_ms"], 8)
        self.assertLess(r["ttft_ms"]["min"], r["prefill_ms"]["min"])

    def test_a_table_for_people(self):
        result = lockstep("bench", "latency", self.model, *NULL, "--repeats", 2, "--output-len", 4)
        self.assertEqual(result.status, 0, result.err)
        text = result.out.decode()
        for piece in ("ttft_ms", "prefill_ms", "step_ms", "e2e_ms", "p99", "8 requests at once of 32 + 4 tokens", "Measured on"):
            self.assertIn(piece, text)

    def test_refusals(self):
        run = lambda *args: lockstep("bench", "latency", self.model, *NULL, *args)
        self.assert_refused(run("--input-len", 4000, "--output-len", 200), "4200", "4096")
        self.assert_refused(run("--input-len", 50, "--max-model-len", 64), "50 tokens", "128 of the answer", "178", "64")
        self.assert_refused(run("--batch-size", 9, "--max-num-seqs", 8), "--batch-size 9", "--max-num-seqs 8")
        self.assert_refused(run("--repeats", 0), "--repeats 0")
        self.assert_refused(lockstep("bench", "latency", self.folder / "none", ranks=2), "none")
        self.assert_refused(lockstep("bench", "latency"), "MODEL is missing", "lockstep bench latency --help")
        self.assert_refused(lockstep("bench"), "known: latency, throughput, serve")
        self.assert_refused(lockstep("bench", "colectives"), "there is no benchmark 'colectives'", "known: latency, throughput")
        self.assert_refused(run("--repeat", 1), "did you mean --repeats?")

    def test_help(self):
        kinds = lockstep("help", "bench")
        self.assertEqual((kinds.status, kinds.out), (0, lockstep("bench", "--help").out))
        self.assertIn(b"bench", lockstep("help").out)
        for kind in ("latency", "throughput", "serve"):
            self.assertIn(kind.encode(), kinds.out)
            text = lockstep("bench", kind, "--help").out.decode()
            self.assertTrue(text.startswith(f"Usage: lockstep bench {kind} "), text)
            self.assertLessEqual(max(map(len, text.splitlines())), 90)


class BenchThroughputTest(Bench):
    def check_rates(self, r, ranks):
        self.assertEqual(r["total_num_tokens"], r["total_input_tokens"] + r["total_output_tokens"])
        for rate, count in {"requests_per_second": "num_requests", "input_tokens_per_second": "total_input_tokens",
                            "output_tokens_per_second": "total_output_tokens", "tokens_per_second": "total_num_tokens"}.items():
            self.assertAlmostEqual(r[rate] * r["elapsed_time"] / r[count], 1, places=9)
            self.assertAlmostEqual(r[rate + "_per_rank"] * ranks / r[rate], 1, places=9)

    def test_random_prompts(self):
        for ranks in (1, 2):
            r = self.bench("throughput", self.model, *DUMMY, "--num-prompts", 30, "--input-len", 9, "--output-len", 7, ranks=ranks)
            self.assertEqual((r["num_requests"], r["num_answers"], r["total_input_tokens"], r["total_output_tokens"]),
                             (30, 30, 270, 210))
            self.assertEqual((r["num_ranks"], r["dataset"]), (ranks, "random"))
            self.check_rates(r, ranks)

    def test_lengths_that_are_drawn(self):
        run = lambda *args: self.bench("throughput", self.model, *NULL, "--num-prompts", 40, "--input-len", 20, "--output-len", 10,
                                       *args)
        uniform = run("--length-distribution", "uniform:0.5", "--seed", 3)
        self.assertTrue(40 * 10 <= uniform["total_input_tokens"] <= 40 * 30, uniform)
        self.assertTrue(40 * 5 <= uniform["total_output_tokens"] <= 40 * 15, uniform)
        for name in ("total_input_tokens", "total_output_tokens"):
            self.assertEqual(uniform[name], run("--length-distribution", "uniform:0.5", "--seed", 3)[name])
        self.assertNotEqual(uniform["total_input_tokens"], run("--length-distribution", "uniform:0.5", "--seed", 4)["total_input_tokens"])
        self.assertNotEqual(run("--length-distribution", "lognormal:1")["total_output_tokens"], 400)

    def test_a_file_of_prompts(self):
        lines = self.write_lines({"prompt": [1, 2, 3]}, {"prompt": [4, 5], "max_tokens": 2, "n": 3}, "", {"prompt": [6]})
        r = self.bench("throughput", self.model, *NULL, "--prompts", lines, "--output-len", 5)
        self.assertEqual((r["num_requests"], r["num_answers"], r["total_input_tokens"], r["total_output_tokens"]), (3, 5, 6, 16))
        self.check_rates(r, 1)
        r = self.bench("throughput", self.model, *NULL, "--prompts", lines, "--output-len", 5, "--num-prompts", 2)
        self.assertEqual((r["num_requests"], r["total_input_tokens"]), (2, 5))
        write_tokenizer(self.model)
        r = self.bench("throughput", self.model, *NULL, "--prompts", "-", stdin=b'{"prompt": "abc"}\n')
        self.assertEqual(r["total_input_tokens"], 4)  # <s> and three bytes

    def test_refusals(self):
        def refused(lines, *pieces, args=()):
            path = self.write_lines(*lines)
            self.assert_refused(lockstep("bench", "throughput", self.model, *NULL, "--prompts", path, *args), *pieces)
        refused([{"prompt": [1]}, {"max_tokens": 3}], "prompts.jsonl line 2", "prompt is missing")
        refused([{"prompt": [1]}, "{"], "prompts.jsonl line 2")
        refused([{"prompt": [1] * 60, "max_tokens": 10}], "line 1", "70", "64", args=["--max-model-len", 64])
        refused([{"prompt": [1]}], "--num-prompts 2", "holds 1", args=["--num-prompts", 2])
        refused([], "holds no prompt")
        run = lambda *args: lockstep("bench", "throughput", self.model, *NULL, *args)
        self.assert_refused(run("--prompts", self.folder / "none"), "none")
        self.assert_refused(run("--chat"), "--chat needs --prompts")
        self.assert_refused(run("--length-distribution", "normal"), "known: fixed, uniform:RANGE_RATIO, lognormal:SIGMA")
        self.assert_refused(run("--input-len", 4096, "--num-prompts", 1), "4224", "4096")


class BenchCollectivesTest(Bench):
    def test_numbers_agree(self):
        for ranks, transport in ((2, "auto"), (3, "auto"), (4, "mpi")):
            with unittest.mock.patch.dict(os.environ, LOCKSTEP_COLLECTIVES=transport):
                r = self.bench("collectives", "--device", "cpu", "--sizes", "4,1K,20K,1M", "--repeats", 7, "--warmup", 1, ranks=ranks)
            self.assertEqual((r["kind"], r["num_ranks"], r["ranks_on_host"], r["device"]), ("collectives", ranks, ranks, "cpu"))
            self.assertGreater(r["link_bytes_per_second"], 0)
            self.assertEqual([row["bytes"] for row in r["rows"]], [4, 1024, 20480, 1 << 20])
            for row in r["rows"]:
                self.assertEqual(row["algorithm"], "mpi" if transport == "mpi" else "shared memory")
                self.check_statistics(row["us"], 7)
                self.assertAlmostEqual(row["algbw"] * row["us"]["median"] / 1e6, row["bytes"], places=3)
                self.assertAlmostEqual(row["busbw"] / row["algbw"], 2 * (ranks - 1) / ranks)

    def test_a_table_for_people(self):
        result = lockstep("bench", "collectives", "--device", "cpu", "--repeats", 2, "--warmup", 0, ranks=2)
        self.assertEqual(result.status, 0, result.err)
        text = result.out.decode()
        for piece in ("2 ranks, cpu, through shared memory", "busbw GB/s", "16777216 ", "One thread copies 64 MiB"):
            self.assertIn(piece, text)

    def test_refusals(self):
        run = lambda *args, ranks=2: lockstep("bench", "collectives", "--device", "cpu", *args, ranks=ranks)
        self.assert_refused(run(ranks=None), "needs several ranks")
        self.assert_refused(run(ranks=1), "needs several ranks")
        for sizes in ("3", "2G", "", "4,,8", "x"):
            self.assert_refused(run("--sizes", sizes), "--sizes")
        self.assert_refused(run("--repeats", 0), "--repeats 0")
        self.assert_refused(run("model"), "takes options alone")
        self.assertEqual(lockstep("bench", "collectives", "--device", "cuda", ranks=2).status, 2)


class BenchServeTest(Bench):
    def test_our_own_server(self):
        for ranks in (1, 2):
            with Server(LOCKSTEP, SOURCE, self.model, "--null-step-ms", "1", "--served-model-name", "tiny", ranks=ranks) as server:
                url = f"http://127.0.0.1:{server.port}"
                r = self.load(url, "--num-prompts", 30, "--request-rate", 300, "--burstiness", 0.5, "--input-len", 12,
                              "--output-len", 5, "--save-detailed", "--goodput", "ttft:1e6", "tpot:1e6", "e2el:1e6")
                self.assertEqual((r["completed"], r["failed"], r["model_id"], r["request_rate"]), (30, 0, "tiny", 300))
                self.assertEqual((r["total_input_tokens"], r["total_output_tokens"]), (360, 150))
                self.assertEqual(r["input_lens"], [12] * 30)
                self.assertEqual(r["output_lens"], [5] * 30)
                self.assertEqual(r["request_goodput"], r["request_throughput"])
                self.assertAlmostEqual(r["arrival_times"][-1], 0.1, places=9)
                self.assertEqual((r["dataset"], r["requests_without_usage"]), ("random ids", 0))
                for ttft, itl, text in zip(r["ttfts"], r["itls"], r["generated_texts"]):
                    self.assertGreater(ttft, 0)
                    self.assertLessEqual(len(itl), 4)  # events that arrive together are one arrival
                    self.assertTrue(text)
                none = self.load(url + "/v1/", "--num-prompts", 8, "--input-len", 3, "--output-len", 1, "--max-concurrency", 3,
                                 "--goodput", "ttft:0")
                self.assertEqual((none["request_goodput"], none["mean_tpot_ms"], none["request_rate"]), (0, None, "inf"))
                self.assertLessEqual(none["max_concurrent_requests"], 3)
                self.assertEqual(none["held_by_max_concurrency"], 5)
                run = lambda *args: lockstep("bench", "serve", "--base-url", url, *args)
                self.assert_refused(run("--input-len", 4000), "4128", "4096")
                self.assert_refused(run("--model", "x"), "no model of that name", "known: tiny")
                self.assert_refused(run("--endpoint", "chat"), "no tokenizer")

    def test_chats_and_files(self):
        write_tokenizer(self.model)
        (self.model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
        with Server(LOCKSTEP, SOURCE, self.model, "--api-key", "k", ranks=1) as server:
            url = f"http://127.0.0.1:{server.port}"
            self.assert_refused(lockstep("bench", "serve", "--base-url", url), "401", "--api-key")
            r = self.load(url, "--api-key", "k", "--endpoint", "chat", "--num-prompts", 5, "--input-len", 4, "--output-len", 3)
            self.assertEqual((r["completed"], r["total_output_tokens"], r["dataset"]), (5, 15, "random words"))
            self.assertEqual((r["backend"], r["endpoint_type"]), ("openai-chat", "openai-chat"))
            lines = self.write_lines({"prompt": "Hi", "max_tokens": 2}, {"messages": [{"role": "user", "content": "Hi"}]})
            with unittest.mock.patch.dict(os.environ, OPENAI_API_KEY="k"):
                r = self.load(url, "--endpoint", "chat", "--prompts", lines, "--output-len", 4, "--ignore-eos", "--save-detailed")
            self.assertEqual((r["output_lens"], r["input_lens"]), ([2, 4], [9, 9]))  # "user: Hi\n"

    def test_bad_lines_are_named(self):
        def refused(line, *pieces, args=()):
            path = self.write_lines({"prompt": [1]} if not args else {"prompt": "a"}, line)
            self.assert_refused(lockstep("bench", "serve", "--base-url", "http://127.0.0.1:9", "--prompts", path, *args),
                                "prompts.jsonl line 2", *pieces)
        refused({"max_tokens": 2}, "prompt is missing")
        refused("[1", "")
        refused({"messages": []}, "messages need --endpoint chat")
        refused({"prompt": [1], "n": 2}, "n, logprobs and prompt_logprobs are not measured here")
        refused({"prompt": [1]}, "token ids cannot be asked in a chat", args=["--endpoint", "chat"])

    def test_refusals(self):
        run = lambda *args, **options: lockstep("bench", "serve", *args, **options)
        self.assert_refused(run(), "--base-url is missing")
        self.assert_refused(run("--base-url", "https://h"), "https is not spoken here")
        self.assert_refused(run("--base-url", "h:1"), "http://HOST:PORT")
        unused = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        url = f"http://127.0.0.1:{unused.server_port}"
        unused.server_close()
        self.assert_refused(run("--base-url", url, "--json"), f"cannot reach {url}: Connection refused")
        self.assert_refused(run("--base-url", url, "--goodput", "ttft:1", "itl:2"), "'itl'", "known: ttft, tpot, e2el")
        self.assert_refused(run("--base-url", url, "--goodput", "ttft"), "METRIC:MILLISECONDS")
        self.assert_refused(run("--base-url", url, "--percentile-metrics", "ttft,x"), "'x'", "known: ttft, tpot, itl, e2el")
        self.assert_refused(run("--base-url", url, "--metric-percentiles", "101"), "0 to 100")
        self.assert_refused(run("--base-url", url, "--request-rate", 0), "above 0, or inf")
        self.assert_refused(run("--base-url", url, "--endpoint", "embeddings"), "completions, chat")
        self.assert_refused(run("--base-url", url, "--result-dir", "x"), "need --save-result")
        limited = run("--base-url", url, "--num-prompts", 70, "--max-concurrency", 60,
                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)))
        self.assert_refused(limited, "60 requests may be open at once", "100 files", "36")


class FakeServer:
    """An OpenAI server that misbehaves: `answer(handler, number, body)` writes the answer to POST number 0, 1, ..."""

    def __init__(self, answer, models=({"id": "fake"},)):
        fake = self
        self.bodies, self.changed = [], threading.Condition()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.whole(200 if models is not None else 404, json.dumps({"data": models}))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.changed:
                    number = len(fake.bodies)
                    fake.bodies.append(body)
                    fake.changed.notify_all()
                self.close_connection = True
                answer(self, number, body)

            def whole(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def begin(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()

            def chunk(self, text):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text.encode()))
                self.wfile.flush()

            def event(self, data):
                self.chunk(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n")

            def tokens(self, count, finish="length"):
                for i in range(count):
                    last = finish if i + 1 == count else None
                    self.event({"choices": [{"index": 0, "text": " x", "finish_reason": last}]})

            def end(self):
                self.event("[DONE]")
                self.wfile.write(b"0\r\n\r\n")

        class Threads(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self.server = Threads(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def wait_for_posts(self, count):
        with self.changed:
            return self.changed.wait_for(lambda: len(self.bodies) >= count, timeout=30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def good(handler, tokens, usage=True):
    handler.begin()
    handler.tokens(tokens)
    if usage:
        handler.event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": tokens}})
    handler.end()


class BenchFaultyServerTest(Bench):
    def run_load(self, fake, *args, **options):
        return self.load(fake.url, "--num-prompts", 8, "--input-len", 5, "--output-len", 3, "--save-detailed", "--no-test-request",
                         "--max-concurrency", 1, *args, **options)

    def test_each_fault_is_told_and_others_go_on(self):
        def answer(handler, number, _):
            if number == 0:
                handler.whole(500, '{"error": "no luck"}')
            elif number == 1:
                pass  # closes without a word
            elif number == 2:
                handler.begin()
                handler.tokens(2, finish=None)  # and closes
            elif number == 3:
                handler.begin()
                handler.tokens(2, finish=None)
                handler.wfile.write(b"0\r\n\r\n")  # a whole body, no end of the answer
            elif number == 4:
                handler.begin()
                handler.event("{no json")
                handler.end()
            elif number == 5:
                handler.begin()
                handler.tokens(1, finish=None)
                handler.event({"error": {"message": "ran out of luck"}})
                handler.end()
            elif number == 6:
                handler.begin()
                handler.end()
            else:
                good(handler, 3)
        with FakeServer(answer) as fake:
            r = self.run_load(fake, status=1)
        self.assertEqual((r["completed"], r["failed"], r["model_id"]), (1, 7, "fake"))
        pieces = ["HTTP status 500: {\"error\": \"no luck\"}", "the connection ended before a response",
                  "the connection ended within the response", "without finish_reason and [DONE]", "no JSON: {no json",
                  "an event says: ran out of luck", "brought no token", ""]
        for error, piece in zip(r["errors"], pieces):
            self.assertIn(piece, error)
        self.assertEqual((r["output_lens"], r["total_input_tokens"]), ([0] * 7 + [3], 11))

    def test_without_usage_events_are_counted(self):
        with FakeServer(lambda handler, number, _: good(handler, 3 + number, usage=False)) as fake:
            r = self.run_load(fake)
        self.assertEqual((r["output_lens"], r["requests_without_usage"]), ([*range(3, 11)], 8))
        self.assertEqual(r["total_input_tokens"], 40)
        self.assertEqual([len(itl) for itl in r["itls"]], [*range(2, 10)])

    def test_nothing_but_failures(self):
        with FakeServer(lambda handler, *_: handler.whole(503, "busy")) as fake:
            r = self.run_load(fake, status=1)
            self.assertEqual((r["completed"], r["total_output_tokens"], r["mean_ttft_ms"], r["p99_e2el_ms"]), (0, 0, None, None))
            result = lockstep("bench", "serve", "--base-url", fake.url)
            self.assert_refused(result, "a first request of 8 tokens has failed", "HTTP status 503: busy")

    def test_requests_do_not_wait_for_answers(self):
        # No answer before all requests are there.
        def answer(handler, number, body):
            self.assertTrue(fake.wait_for_posts(20))
            good(handler, 2)
        with FakeServer(answer) as fake:
            r = self.load(fake.url, "--num-prompts", 20, "--request-rate", 400, "--input-len", 5, "--output-len", 2, "--no-test-request")
        self.assertEqual((r["completed"], r["max_concurrent_requests"], r["held_by_max_concurrency"]), (20, 20, 0))

    def test_a_server_that_stalls(self):
        stop = threading.Event()
        with FakeServer(lambda handler, number, _: good(handler, 2) if number else stop.wait(30)) as fake:
            r = self.run_load(fake, "--request-timeout", "3", status=1)
            stop.set()
        self.assertEqual((r["completed"], r["failed"]), (7, 1))
        self.assertIn("no end within 3 s", r["errors"][0])

    def test_a_signal_ends_it_with_what_there_is(self):
        """Requests 0 to 3 are answered, 4 and 5 never, and 6 and 7 wait for a place."""
        stop = threading.Event()
        with FakeServer(lambda handler, number, _: good(handler, 2) if number < 4 else stop.wait(30)) as fake:
            for number in (signal.SIGINT, signal.SIGTERM):
                fake.bodies.clear()
                saved = self.folder / f"{number.name}.json"
                bench = subprocess.Popen(
                    [LOCKSTEP, "bench", "serve", "--base-url", fake.url, "--num-prompts", "8", "--max-concurrency", "2", "--no-test-request",
                     "--output-len", "2", "--json", "--save-result", "--save-detailed", "--result-filename", str(saved)],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                self.assertTrue(fake.wait_for_posts(6))
                bench.send_signal(number)
                out, err = bench.communicate(timeout=10)
                self.assertEqual(bench.returncode, 1, err)
                r = json.loads(out)
                self.check_result(r, unsent=2)
                self.assertEqual((r["completed"], r["failed"]), (4, 4), r)
                self.assertEqual(json.loads(saved.read_text()), r)
                self.assertIn(number.name, err.decode())
            stop.set()
        self.assertEqual(sorted(f.name for f in self.folder.glob("*SIG*")), ["SIGINT.json", "SIGTERM.json"])

    def test_words_where_ids_are_not_taken(self):
        def answer(handler, number, body):
            if not isinstance(body["prompt"], str):
                return handler.whole(400, "text only")
            good(handler, body["max_tokens"])
        with FakeServer(answer) as fake:
            r = self.load(fake.url, "--num-prompts", 4, "--input-len", 5, "--output-len", 2)
            self.assertEqual((r["completed"], r["dataset"]), (4, "random words"))
            self.assertEqual([len(body["prompt"].split()) for body in fake.bodies[2:]], [5] * 4)

    def test_what_is_asked(self):
        with FakeServer(lambda handler, number, body: good(handler, body["max_tokens"])) as fake:
            args = ["--num-prompts", 3, "--input-len", 6, "--output-len", 2, "--vocab-size", 9, "--no-test-request"]
            self.load(fake.url, *args, "--max-concurrency", 1)
            self.load(fake.url, *args, "--max-concurrency", 1, "--no-ignore-eos", "--model", "fake")
            first, second = fake.bodies[:3], fake.bodies[3:]
        for body in first:
            ids = body.pop("prompt")
            self.assertTrue(len(ids) == 6 and all(3 <= i < 9 for i in ids), ids)
            self.assertEqual(body, {"model": "fake", "temperature": 0, "ignore_eos": True, "max_tokens": 2, "stream": True,
                                    "stream_options": {"include_usage": True}})
        self.assertNotIn("ignore_eos", second[0])
        with FakeServer(lambda handler, number, _: good(handler, 2), models=None) as fake:
            self.assert_refused(lockstep("bench", "serve", "--base-url", fake.url), "lists no model: give --model")
            r = self.load(fake.url, "--model", "any", "--num-prompts", 2)
            self.assertEqual(r["model_id"], "any")

    def test_results_in_a_file(self):
        with FakeServer(lambda handler, number, _: good(handler, 2)) as fake:
            args = ["--num-prompts", 3, "--save-result", "--result-dir", self.folder / "a/b", "--request-rate", 200]
            r = self.load(fake.url, *args, "--max-concurrency", 2)
            files = list((self.folder / "a/b").iterdir())
            self.assertEqual([f.name for f in files], [f"openai-200qps-concurrency2-fake-{r['date']}.json"])
            self.assertEqual(json.loads(files[0].read_text()), r)
            table = lockstep("bench", "serve", "--base-url", fake.url, *args, "--result-filename", "r.json", ranks=2)
            self.assertEqual(table.status, 0, table.err)
            text, saved = table.out.decode(), json.loads((self.folder / "a/b/r.json").read_text())
            self.assertEqual(text.count("Serving Benchmark Result"), 1)
            self.assertIn(f"{'Successful requests:':40} {saved['completed']}", text)
            self.assert_refused(lockstep("bench", "serve", "--base-url", fake.url, "--save-result", "--result-dir", "/proc/none"),
                                "cannot write /proc/none")


if __name__ == "__main__":
    main()
