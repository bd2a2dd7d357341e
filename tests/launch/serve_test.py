#!/usr/bin/env python3
"""`lockstep serve` as its operator sees it: start, health, metrics, the page, and every way to stop it.

usage: serve_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only
"""
import json, os, re, shutil, signal, socket, subprocess, threading, time, unittest

from command_harness import DUMMY, GREEDY, LOCKSTEP, SOURCE, Commands, lockstep, main, write_tokenizer
from serve_harness import Server, Stream, expected_ids, is_running, metric, parse_metrics

PROMPT = [1, 5, 9]
NULL = ["--load-format", "null"]
SHUTTING_DOWN = "the server is shutting down"


class Servers(Commands):
    def serve(self, *args, **options):
        return Server(LOCKSTEP, SOURCE, options.pop("model", self.model), *args, **options)

    def assert_answers(self, server, prompt=PROMPT, **fields):
        answer = server.complete(prompt, max_tokens=6, temperature=0, **fields)
        self.assertEqual([int(i) for i in answer["choices"][0]["text"].split()], expected_ids(prompt, 6))


class StartTest(Servers):
    def test_health_is_503_until_the_model_is_loaded(self):
        # Some hundred megabytes of made-up weights: a start long enough to be seen.
        self.edit_config(hidden_size=1536, intermediate_size=4096, num_hidden_layers=6, head_dim=256)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for ranks in (1, 2):
            with self.serve("--load-format", "dummy", "--port", port, "--num-gpu-blocks-override", 64, ranks=ranks, null=False,
                            wait=False) as server:
                server.port, statuses = port, []

                def is_ready():
                    try:
                        status, _, text = server.get("/health")
                    except ConnectionError:
                        return False
                    statuses.append((status, json.loads(text)["status"]))
                    if status == 503 and len(statuses) == 1:
                        refused = server.request("POST", "/v1/completions", {"prompt": [1]})
                        self.assertEqual(refused[0], 503, refused)
                        self.assertIn("Retry-After", refused[1])
                        self.assertIn("being loaded", json.loads(refused[2])["error"]["message"])
                        self.assertEqual(metric(server.metrics(), "lockstep:ready"), 0)
                    return status == 200

                server.wait_for(is_ready)
                self.assertEqual(set(statuses), {(503, "starting"), (200, "ready")})
                server.wait_ready()
                self.assertEqual(len(server.complete([1, 2], max_tokens=2)["choices"]), 1)
                os.kill(server.rank(0), signal.SIGTERM)
                self.assertEqual(server.wait_ended(), 0, server.read_log())

    def test_a_signal_before_it_is_ready_ends_it(self):
        self.edit_config(hidden_size=1536, intermediate_size=4096, num_hidden_layers=40, head_dim=256)
        with self.serve("--load-format", "dummy", "--num-gpu-blocks-override", 64, ranks=None, null=False, wait=False) as server:
            # The port is open then, and the weights are to come.
            server.wait_for(lambda: "attention backend" in server.read_log() or server.process.poll() is not None)
            server.process.send_signal(signal.SIGTERM)
            self.assertEqual(server.process.wait(timeout=10), -signal.SIGTERM)
            self.assertIn("SIGTERM before the server was ready", server.read_log())

    def test_what_cannot_be_served_is_refused_before_the_weights(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            for ranks in (None, 1, 2):
                self.assert_refused(lockstep("serve", self.model, *NULL, "--port", port, ranks=ranks), str(port), "in use")
        self.assert_refused(lockstep("serve", self.model, *NULL, "--port", 0, "--host", "256.1.1.1"), "256.1.1.1")
        self.assert_refused(lockstep("serve", self.model, *NULL, "--port", 65536), "--port")
        self.assert_refused(lockstep("serve", self.model, "--port", 0), "model.safetensors")
        self.assert_refused(lockstep("serve", self.model, *NULL, "--port", 0, "--drain-seconds", "-1"), "--drain-seconds")
        self.assert_refused(lockstep("serve", self.model, *NULL, "--port", 0, "--null-step-ms", 70000), "--null-step-ms")
        self.assert_refused(lockstep("serve", self.model, "--load-format", "dummy", "--port", 0, "--null-step-ms", 5),
                            "--null-step-ms needs --load-format null")
        write_tokenizer(self.model)
        self.assert_refused(lockstep("serve", self.model, *NULL, "--port", 0, "--chat-template", self.folder / "no.jinja"),
                            "--chat-template", "no.jinja")
        (self.folder / "bad.jinja").write_text("{% if %}")
        self.assert_refused(lockstep("serve", self.model, *NULL, "--port", 0, "--chat-template", self.folder / "bad.jinja"),
                            "--chat-template", "bad.jinja")

    def test_chat_template_and_names(self):
        write_tokenizer(self.model)
        (self.model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
        template = self.folder / "own.jinja"
        template.write_text("{{ bos_token }}{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
        with self.serve("--chat-template", template, "--served-model-name", "one", "--served-model-name", "two") as server:
            for name in ("one", "two"):
                status, _, text = server.request("POST", "/v1/chat/completions", {
                    "model": name, "max_tokens": 3, "messages": [{"role": "user", "content": "abc"}]})
                self.assertEqual(status, 200, text)
                self.assertEqual(json.loads(text)["usage"]["prompt_tokens"], 4)  # <s>ABC
            self.assertEqual(metric(server.metrics(), "lockstep:engine_info", chat="yes", model_name="one"), 1)
        with self.serve() as server:
            status, _, text = server.request("POST", "/v1/chat/completions", {
                "model": str(self.model), "messages": [{"role": "user", "content": "abc"}]})
            self.assertEqual(status, 400, text)
            self.assertIn("chat template", json.loads(text)["error"]["message"])

    def test_keys_guard_the_api_and_nothing_else(self):
        with self.serve("--api-key", "first", "--api-key", "second", env={"LOCKSTEP_API_KEY": "third"}) as server:
            for path in ("/health", "/metrics", "/version", "/"):
                self.assertEqual(server.get(path)[0], 200, path)
            for key, status in ((None, 401), ("fourth", 401), ("first", 200), ("second", 200), ("third", 200)):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                self.assertEqual(server.get("/v1/models", headers=headers)[0], status, key)


class AnswersTest(Servers):
    def test_answers_are_those_of_generate(self):
        prompts = [[1, 2, 3], list(range(10, 60)), [7]]
        expected = [self.answers("--ids", ",".join(map(str, p)), *GREEDY, "--max-tokens", 20, ranks=2)[0]["token_ids"]
                    for p in prompts]
        with self.serve(*DUMMY, ranks=2, null=False) as server:
            streams = [server.stream(p, max_tokens=20, temperature=0) for p in prompts]
            for stream, ids in zip(streams, expected):
                chunks = [json.loads(e) for e in stream if e != "[DONE]"]
                self.assertEqual([int(i) for c in chunks for i in c["choices"][0]["text"].split()], ids)
                stream.close()

    def test_what_it_says_of_itself(self):
        with self.serve(ranks=2) as server:
            status, headers, text = server.get("/health")
            self.assertEqual((status, json.loads(text)), (200, {"status": "ready"}))
            self.assertEqual(json.loads(server.get("/version")[2]), {"version": lockstep("version").out.split()[1].decode()})
            for path in ("/health", "/metrics", "/version", "/"):
                status, headers, text = server.request("POST", path, {})
                self.assertEqual((status, headers["Allow"]), (405, "GET, HEAD"), path)
                self.assertIn("error", json.loads(text))
            self.assertEqual(server.get("/nothing")[0], 404)

    def test_the_page_needs_nothing_else(self):
        with self.serve() as server:
            status, headers, page = server.get("/")
        self.assertEqual((status, headers["Content-Type"]), (200, "text/html; charset=utf-8"))
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        self.assertEqual(page, (SOURCE / "launch/serve/console.html").read_text())
        self.assertEqual(re.findall(r"""(?:src|href|url\(|import)\s*[=(]?\s*["']?(?!data:)(https?:[^"')\s]+|//[^"')\s]+)""", page), [])
        self.assertEqual(set(re.findall(r"https?://[^\s\"']+", page)), {"http://www.w3.org/2000/svg"})  # a namespace

    def test_metrics_count_what_happens(self):
        with self.serve("--num-gpu-blocks-override", 200, ranks=2) as server:
            before = server.metrics()
            self.assertEqual(metric(before, "lockstep:engine_info", ranks="2", device="cpu", weights="null"), 1)
            self.assert_answers(server)
            long = list(range(3, 103))
            for _ in range(2):  # the second finds six blocks
                self.assert_answers(server, long)
            server.complete(PROMPT, max_tokens=4, n=3)
            self.assertEqual(server.request("POST", "/v1/completions", "{")[0], 400)
            server.wait_for(lambda: server.metric("lockstep:num_requests_running") == 0)
            samples = server.metrics()
            for name, value in {"prompt_tokens_total": 3 + 200 + 3, "generation_tokens_total": 18 + 12,
                                "prefix_cache_hits_total": 96 + 2 * 2, "kv_cache_blocks": 200, "kv_cache_used_blocks": 0,
                                "num_requests_waiting": 0, "num_preemptions_total": 0, "ready": 1, "kv_cache_usage_perc": 0,
                                "time_to_first_token_seconds_count": 6, "inter_token_latency_seconds_count": 24,
                                "e2e_request_latency_seconds_count": 6, "request_queue_time_seconds_count": 4,
                                "http_requests_open": 0}.items():
                self.assertEqual(metric(samples, "lockstep:" + name), value, name)
            for reason, value in {"length": 6, "stop": 0, "abort": 0, "error": 0}.items():
                self.assertEqual(metric(samples, "lockstep:request_success_total", finished_reason=reason), value, reason)
            self.assertEqual(metric(samples, "lockstep:requests_refused_total", status="400"), 1)
            self.assertGreaterEqual(metric(samples, "lockstep:steps_total"), 6)
            for phase in ("plan", "broadcast", "launch", "land", "deliver"):
                self.assertGreater(metric(samples, "lockstep:step_phase_seconds_total", phase=phase), 0)
            names = {s.name for s in samples}
            self.assertLessEqual({s.name for s in before}, names)

    def test_a_client_that_leaves_frees_its_blocks(self):
        with self.serve("--null-step-ms", 5, ranks=2) as server:
            streams = [server.stream(list(range(i, i + 50)), max_tokens=3000) for i in range(3)]
            for stream in streams:
                stream.next()
            self.assertEqual(server.metric("lockstep:num_requests_running"), 3)
            for stream in streams[1:]:
                stream.close()
            server.wait_for(lambda: server.metric("lockstep:num_requests_running") == 1, seconds=1)
            self.assertEqual(server.metric("lockstep:request_success_total", finished_reason="abort"), 2)
            streams[0].close()
            server.wait_for(lambda: server.metric("lockstep:kv_cache_used_blocks") == 0, seconds=1)
            self.assert_answers(server)


class EndTest(Servers):
    """After what ends a server, every process is gone and the exit status is known."""

    def events_of(self, stream, into):
        def read():
            try:
                into.extend(stream)
            except Exception as e:  # the connection broke
                into.append(repr(e))
            stream.close()
        thread = threading.Thread(target=read)
        thread.start()
        return thread

    def check_drain(self, ranks, send):
        """Running requests finish, new ones are refused, the exit status is 0."""
        with self.serve("--null-step-ms", 5, ranks=ranks) as server:
            name = server.model_name()
            stream, events = server.stream(PROMPT, max_tokens=200), []
            stream.next()
            reader = self.events_of(stream, events)
            send(server)
            server.wait_for(lambda: server.get("/health")[0] == 503, seconds=1)
            self.assertEqual(json.loads(server.get("/health")[2]), {"status": "draining"})
            status, headers, text = server.request("POST", "/v1/completions", {"model": name, "prompt": PROMPT})
            self.assertEqual(status, 503, text)
            self.assertIn("Retry-After", headers)
            reader.join()
            self.assertEqual(events[-1], "[DONE]")
            chunks = [json.loads(e) for e in events[:-1]]
            self.assertEqual([c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]], ["length"])
            ids = [int(i) for c in chunks for i in c["choices"][0]["text"].split()]
            self.assertEqual(ids, expected_ids(PROMPT, 200)[-len(ids):])  # the first event was read before
            self.assertGreater(len(ids), 190)
            self.assertEqual(server.wait_ended(), 0, server.read_log())

    def test_sigterm_to_rank_0_drains(self):
        for ranks in (None, 1, 2):
            self.check_drain(ranks, lambda server: os.kill(server.rank(0), signal.SIGTERM))

    def test_sigint_to_rank_0_drains(self):
        self.check_drain(2, lambda server: os.kill(server.rank(0), signal.SIGINT))

    def test_sigusr2_to_mpirun_drains(self):
        for ranks in (1, 2):
            self.check_drain(ranks, lambda server: os.kill(server.mpirun(), signal.SIGUSR2))

    def test_sigterm_and_ctrl_c_to_the_script_drain(self):
        self.check_drain(2, lambda server: os.kill(server.process.pid, signal.SIGTERM))
        # A terminal sends it to the whole foreground group.
        self.check_drain(2, lambda server: os.killpg(os.getpgid(server.process.pid), signal.SIGINT))

    def check_cut_short(self, ranks, send, args=(), status=0, within=3):
        """A stream gets an error event, a request that is not streamed 503, and all end."""
        with self.serve("--null-step-ms", 10, *args, ranks=ranks) as server:
            name = server.model_name()
            stream, events, plain = server.stream(PROMPT, max_tokens=4000), [], []
            stream.next()
            reader = self.events_of(stream, events)
            body = {"model": name, "prompt": PROMPT, "max_tokens": 4000}
            other = threading.Thread(target=lambda: plain.append(server.request("POST", "/v1/completions", body)))
            other.start()
            server.wait_for(lambda: server.metric("lockstep:num_requests_running") == 2)
            start = time.monotonic()
            send(server)
            ended = server.wait_ended()
            self.assertLess(time.monotonic() - start, within)
            reader.join()
            other.join()
            if status is not None:
                self.assertEqual(ended, status, server.read_log())
            error = json.loads(next(e for e in reversed(events) if e != "[DONE]"))["error"]
            self.assertEqual(error["message"], SHUTTING_DOWN)
            self.assertEqual(plain[0][0], 503)
            self.assertEqual(json.loads(plain[0][2])["error"]["message"], SHUTTING_DOWN)
            self.assertIn("the server has ended", server.read_log())

    def test_a_second_signal_ends_at_once(self):
        def twice(pid, number, server):
            os.kill(pid, number)
            server.wait_for(lambda: server.get("/health")[0] == 503)
            time.sleep(0.3)
            os.kill(pid, number)
        for ranks in (None, 2):
            self.check_cut_short(ranks, lambda server: twice(server.rank(0), signal.SIGTERM, server))
        self.check_cut_short(2, lambda server: twice(server.mpirun(), signal.SIGUSR2, server))

    def test_a_signal_to_all_processes_counts_once(self):
        def send(server):
            for pid in (server.mpirun(), server.rank(1), server.rank(0)):
                os.kill(pid, signal.SIGUSR2)
        self.check_drain(2, send)

    def test_the_drain_has_an_end(self):
        self.check_cut_short(2, lambda server: os.kill(server.rank(0), signal.SIGTERM), ["--drain-seconds", 0.5])
        self.check_cut_short(1, lambda server: os.kill(server.rank(0), signal.SIGTERM), ["--drain-seconds", 0])

    def test_sigterm_to_mpirun_is_told_within_its_second(self):
        # What mpirun exits with is its own affair.
        for ranks in (1, 2):
            self.check_cut_short(ranks, lambda server: os.kill(server.mpirun(), signal.SIGTERM), status=None)

    @unittest.skipUnless(shutil.which("setpriv"), "no setpriv")
    def test_a_killed_script_leaves_nothing_behind(self):
        with self.serve(ranks=2) as server:
            server.process.kill()
            self.assertEqual(server.wait_ended(), -signal.SIGKILL)

    def test_an_idle_server_ends_at_once(self):
        for ranks in (None, 2):
            with self.serve(ranks=ranks) as server:
                self.assert_answers(server)
                start = time.monotonic()
                os.kill(server.rank(0), signal.SIGTERM)
                self.assertEqual(server.wait_ended(), 0, server.read_log())
                self.assertLess(time.monotonic() - start, 2)

    def test_signals_to_other_ranks_end_nothing(self):
        with self.serve(ranks=2) as server:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                os.kill(server.rank(1), number)
            self.assert_answers(server)
            self.assertTrue(is_running(server.rank(1)))

    def test_a_dead_rank_ends_the_job_and_clients_know(self):
        with self.serve("--null-step-ms", 10, ranks=2) as server:
            stream, events = server.stream(PROMPT, max_tokens=4000), []
            stream.next()
            reader = self.events_of(stream, events)
            os.kill(server.rank(1), signal.SIGKILL)
            self.assertNotEqual(server.wait_ended(), 0)
            reader.join()
            last = next(e for e in reversed(events) if e != "[DONE]")
            self.assertNotIn("choices", last)  # an error event, or the connection broke


if __name__ == "__main__":
    main()
