#!/usr/bin/env python3
"""`lockstep batch` from outside: bad lines, kills and resumption, two writers, order, pipes, a full disk.

usage: batch_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only

The null model answers: what it says of a prompt is known (expected_ids), whatever the number of ranks.
"""
import collections, json, os, pathlib, random, re, resource, signal, subprocess, tempfile, time

from command_harness import DUMMY, LOCKSTEP, RUN, Commands, lockstep, main, write_tokenizer
from serve_harness import descendants, environ_of, expected_ids, is_running

NULL = ["--load-format", "null"]


def prompt_of(number):
    draw = random.Random(number)
    return [draw.randrange(320) for _ in range(1 + number % 7)]


def request(number, length=None):
    """Line `number`, greedy; every third one in the plain form."""
    body = {"prompt": prompt_of(number), "max_tokens": length or 1 + number % 9, "temperature": 0}
    if number % 3 == 0:
        return {"custom_id": f"r{number}", **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def text_of(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def read_records(path):
    """The whole lines of a file, which must all be records."""
    data = pathlib.Path(path).read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def line_of(record):
    assert record["id"].startswith("batch_req_"), record
    return int(record["id"][len("batch_req_"):])


class Job:
    """run.sh -n RANKS batch ... (None: the binary itself) in the background; killed, whatever happened, at the end of a with block."""

    def __init__(self, *args, ranks=None, env=None):
        self.stderr = tempfile.TemporaryFile()
        self.ranks = ranks
        command = ["bash", str(RUN), "-n", str(ranks)] if ranks else [LOCKSTEP]
        self.process = subprocess.Popen(
            [*command, "batch", *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.stderr,
            start_new_session=True, env={**os.environ, "LOCKSTEP": LOCKSTEP, "CUDA_VISIBLE_DEVICES": "", **(env or {})})
        self.pids = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in {*self.pids, *descendants(self.process.pid)}:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()
        self.stderr.close()

    def log(self):
        return os.pread(self.stderr.fileno(), 1 << 20, 0).decode(errors="replace")

    def wait_for(self, what, seconds=60):
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"not within {seconds} s: {self.log()}"
            assert self.process.poll() is None or what(), f"the job has ended: {self.log()}"
            time.sleep(0.005)
        self.pids = descendants(self.process.pid)

    def rank(self, rank):
        if not self.ranks:
            return self.process.pid
        return next(p for p in descendants(self.process.pid)
                    if environ_of(p).get(b"OMPI_COMM_WORLD_RANK") == b"%d" % rank and is_running(p))

    def wait(self, seconds=60):
        return self.process.wait(timeout=seconds)


class Batches(Commands):
    def setUp(self):
        super().setUp()
        self.input, self.output = self.folder / "in.jsonl", self.folder / "out.jsonl"

    def arguments(self, *args):
        return [self.model, *NULL, "--input", self.input, "--output", self.output, *args]

    def batch(self, *args, ranks=None, **options):
        return lockstep("batch", *self.arguments(*args), ranks=ranks, **options)

    def start(self, *args, ranks=None, **options):
        return Job(*self.arguments(*args), ranks=ranks, **options)

    def count(self):
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def write_requests(self, count, length=None):
        lines = [request(number, length) for number in range(1, count + 1)]
        self.input.write_text(text_of(lines))
        return lines

    def assert_answers(self, records, lines):
        """Each line once, with its own answer."""
        self.assertEqual(collections.Counter(map(line_of, records)), collections.Counter(range(1, len(lines) + 1)))
        for record in records:
            line = lines[line_of(record) - 1]
            body = line.get("body", line)
            self.assertEqual(list(record), ["id", "custom_id", "response", "error"])
            self.assertEqual((record["custom_id"], record["error"]), (line["custom_id"], None))
            self.assertEqual(record["response"]["status_code"], 200)
            self.assertTrue(record["response"]["request_id"])
            answer = record["response"]["body"]["choices"][0]
            self.assertEqual([int(i) for i in answer["text"].split()], expected_ids(body["prompt"], body["max_tokens"]))


class LinesTest(Batches):
    def test_every_bad_line_has_a_record_and_no_good_one_suffers(self):
        good = json.dumps(request(1)).encode()
        lines = [
            b"\xef\xbb\xbf" + good, b"", b"  \t ", b"{broken", b"[1, 2]",
            json.dumps({"custom_id": "long", "prompt": [1] * 3000}).encode(),
            json.dumps({"custom_id": "stream", "prompt": [1], "stream": True}).encode(),
            json.dumps({"custom_id": "big", "url": "/v1/completions", "body": {"prompt": [1] * (1 << 20), "temperature": 0}}).encode(),
            b'{"custom_id": "utf8", "prompt": "\xff"}',
            b'{"custom_id": 7, "prompt": [1]}', b'{"custom_id": "url", "url": "/v1/embeddings", "body": {}}',
            b'{"custom_id": "method", "method": "GET", "url": "/v1/completions", "body": {"prompt": [1]}}',
            b'{"custom_id": "body", "url": "/v1/completions"}', b'{"custom_id": "none"}',
            b'{"custom_id": "model", "prompt": [1], "model": "other"}', b'{"custom_id": "type", "prompt": [1], "max_tokens": "x"}',
            b"17", b'"text"', b"null", b"{}", b'{"custom_id": "chat", "messages": [{"role": "user", "content": "x"}]}',
            good + b"\r", b'{"a":' * 400, good]
        self.assertGreater(len(lines[7]), 3 << 20)
        self.input.write_bytes(b"\n".join(lines))  # the last line has no end
        result = self.batch("--max-model-len", 2000)
        self.assertEqual(result.status, 1, result.err)
        records = {line_of(r): r for r in read_records(self.output)}
        self.assertEqual(sorted(records), [n for n, line in enumerate(lines, 1) if line.strip()])
        self.assertEqual(self.count(), len(records))
        for number, record in records.items():
            if number in (1, 22, 24):
                self.assert_answers([{**record, "id": "batch_req_1"}], [request(1)])
                continue
            self.assertGreaterEqual(record["response"]["status_code"], 400)
            self.assertEqual(record["error"]["line"], number)
            self.assertTrue(record["error"]["code"] and record["error"]["message"], record)
            self.assertEqual(record["response"]["body"]["error"]["message"], record["error"]["message"])
        ids = {n: r["custom_id"] for n, r in records.items()}
        self.assertEqual([ids[n] for n in (4, 6, 7, 8, 9, 10, 11)], [None, "long", "stream", "big", None, None, "url"])
        self.assertEqual(records[6]["error"]["code"], "context_length_exceeded")
        self.assertEqual(records[15]["response"]["status_code"], 404)
        self.assertIn("ok 3, failed %d" % (len(records) - 3), result.err)
        self.assertEqual(len(result.errors()), 0, result.err)

    def test_exit_status(self):
        for text, status in (("", 0), ("\n\n", 0), ("{}\n", 2), ("{}\n" + json.dumps(request(1)), 1), (json.dumps(request(1)), 0)):
            self.input.write_text(text)
            self.output = self.folder / f"out{status}{len(text)}"
            self.assertEqual(self.batch().status, status, text)

    def test_texts_and_chats(self):
        write_tokenizer(self.model)
        template = self.folder / "template.jinja"
        template.write_text("{{ messages[0]['content'] }}!")
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
        self.input.write_text(text_of([{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}, chat,
                                       {"prompt": "Hi!", "max_tokens": 3, "temperature": 0, "return_token_ids": True}]))
        result = self.batch("--chat-template", template, "--ordered")
        self.assertEqual(result.status, 0, result.err)
        first, second, text = (r["response"]["body"] for r in read_records(self.output))
        self.assertEqual(first["object"], "chat.completion")
        self.assertEqual(first["usage"]["prompt_tokens"], 3)  # no <s>: a template writes its own
        self.assertEqual(second["choices"], first["choices"])
        self.assertEqual(text["choices"][0]["token_ids"], expected_ids([300, *b"Hi!"], 3))
        template.write_text("{{ messages[0]['content'] }}?")
        self.assert_refused(self.batch("--chat-template", template), "chat_template")

    def test_stdin_and_stdout(self):
        lines = [request(n) for n in range(1, 30)]
        for ranks in (1, 2):
            result = lockstep("batch", self.model, *NULL, "--input", "-", "--output", "-", ranks=ranks, stdin=text_of(lines).encode())
            self.assertEqual(result.status, 0, result.err)
            self.assert_answers(result.json_lines(), lines)
            self.assertIn("ok 29, failed 0", result.err)
        result = lockstep("batch", self.model, *NULL, "--input", "-", "--output", "/dev/full", stdin=text_of(lines).encode())
        self.assertEqual(result.status, 1)
        self.assertIn("ok 0, failed 0", result.err)
        self.assertIn("No space left", result.err)

    def test_closed_stdin(self):
        """It is one that has nothing, not one for which mpirun waits."""
        command = f"exec bash '{RUN}' -n 2 batch '{self.model}' --load-format null --input - --output - <&-"
        done = subprocess.run(["bash", "-c", command], env={**os.environ, "LOCKSTEP": LOCKSTEP, "CUDA_VISIBLE_DEVICES": ""},
                              capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout), (0, b""), done.stderr)

    def test_defaults_of_lines_that_say_nothing(self):
        self.input.write_text('{"prompt": [5, 6]}\n{"prompt": [5, 6], "max_tokens": 2}\n')
        self.assertEqual(self.batch("--max-tokens", 4, "--temperature", 0, "--seed", 3, "--ordered").status, 0)
        lengths = [r["response"]["body"]["usage"]["completion_tokens"] for r in read_records(self.output)]
        self.assertEqual(lengths, [4, 2])
        refused = self.batch("--max-tokens", 5, "--temperature", 0, "--seed", 3)
        self.assert_refused(refused, "max_tokens (5, was 4)", "--force")
        self.assertEqual(self.batch("--max-tokens", 5, "--temperature", 0, "--seed", 3, "--force").status, 0)

    def test_sampled_answers_follow_from_seed_and_line(self):
        self.input.write_text('{"prompt": [5, 6]}\n' * 4)
        answers = []
        for name in "ab":
            self.output = self.folder / name
            self.assertEqual(lockstep("batch", self.model, "--load-format", "dummy", "--dtype", "float32", "--input", self.input,
                                      "--output", self.output, "--ordered", "--seed", 3).status, 0)
            answers.append([r["response"]["body"]["choices"][0]["text"] for r in read_records(self.output)])
        self.assertEqual(answers[0], answers[1])
        self.assertEqual(len(set(answers[0])), 4)

    def test_memory_does_not_grow_with_the_number_of_lines(self):
        peaks = []
        for count in (2000, 20000):
            self.output = self.folder / f"out{count}"
            self.input.write_text(text_of({"prompt": [n % 320] * 100, "max_tokens": 1} for n in range(count)))
            with self.start("--max-num-seqs", 64) as job:
                peak = 0
                while job.process.poll() is None:
                    try:
                        status = pathlib.Path(f"/proc/{job.rank(0)}/status").read_text()
                        # Not VmHWM: MPI's end reads up to 50 MB of library pages in, or none.
                        peak = max(peak, int(status.split("RssAnon:")[1].split()[0]))
                    except (OSError, IndexError):
                        pass
                    time.sleep(0.02)
                self.assertEqual(job.wait(), 0, job.log())
            self.assertEqual(self.count(), count)
            peaks.append(peak)
        self.assertGreater(peaks[0], 0)
        self.assertLess(peaks[1] - peaks[0], 4 << 10, peaks)  # KiB; the larger input has 9 MB, its answers 8 MB


class ResumeTest(Batches):
    SLOW = ("--null-step-ms", 10, "--max-num-seqs", 8)

    def test_killed_and_resumed_until_done(self):
        """2,000 greedy lines in float32, a rank killed every few hundred: each line once, as in a run that nobody disturbed."""
        count, draw = 2000, random.Random(1)
        self.input.write_text(text_of({"custom_id": f"r{n}", "prompt": prompt_of(n), "max_tokens": 8 + n % 6, "temperature": 0}
                                      for n in range(1, count + 1)))
        files = [self.model, *DUMMY, "--max-num-seqs", 4, "--input", self.input, "--output"]  # slow enough to be hit
        whole = lockstep("batch", *files, self.folder / "whole.jsonl", ranks=2)  # sums of another number round in another way
        self.assertEqual(whole.status, 0, whole.err)
        texts = lambda path: {r["id"]: (r["custom_id"], r["response"]["body"]["choices"][0]["text"]) for r in read_records(path)}
        expected = texts(self.folder / "whole.jsonl")
        self.assertEqual(len(expected), count)
        for victim in (0, 1, 1, 0):
            enough = self.count() + draw.randrange(200, 400)
            with Job(*files, self.output, ranks=2) as job:
                job.wait_for(lambda: self.count() > enough)
                os.kill(job.rank(victim), signal.SIGKILL)
                self.assertNotIn(job.wait(), (0, 2), "it was done before the kill")
            self.assertTrue(all(r["error"] is None for r in read_records(self.output)), "open lines are no failures")
            with open(self.output, "ab") as file:  # as a kill in the middle of a write leaves it
                file.write(b'{"id":"batch_req_1999","custom_id":"r1999","response":{"status_co')
        last = lockstep("batch", *files, self.output, ranks=2)
        self.assertEqual(last.status, 0, last.err)
        self.assertIn("dropped a torn last line", last.err)
        self.assertIn(f"ok {count}, failed 0", last.err)
        self.assertEqual(self.count(), count)
        self.assertEqual(texts(self.output), expected)
        again = lockstep("batch", *files, self.output)
        self.assertEqual(again.status, 0, again.err)
        self.assertIn("this run: 0 lines", again.err)
        self.assertNotIn("ready in", again.err)  # the model is not loaded for nothing
        self.assertEqual(self.count(), count)

    def test_ordered_in_the_middle_of_a_kill(self):
        lines = [request(n, 60 if n % 20 == 1 else 1) for n in range(1, 121)]
        self.input.write_text(text_of(lines))
        with self.start(*self.SLOW, "--ordered", ranks=2) as job:
            job.wait_for(lambda: self.count() >= 30)
            os.kill(job.rank(0), signal.SIGKILL)
            job.wait()
        self.assertEqual(self.batch("--ordered", ranks=2).status, 0)
        records = read_records(self.output)
        self.assertEqual([line_of(r) for r in records], list(range(1, 121)))
        self.assert_answers(records, lines)
        self.output.unlink()
        self.assertEqual(self.batch(*self.SLOW).status, 0)
        self.assertNotEqual([line_of(r) for r in read_records(self.output)], list(range(1, 121)))
        self.assert_refused(self.batch("--ordered"), "--ordered")

    def test_signals_to_the_very_end_do_not_change_the_status(self):
        lines = self.write_requests(8)
        for _ in range(8):
            with self.start("--null-step-ms", 2) as job:
                job.wait_for(lambda: self.count() > 0)
                while job.process.poll() is None:
                    job.process.send_signal(signal.SIGUSR1)
                    time.sleep(0.0002)
                self.assertEqual(job.wait(), 0 if self.count() == len(lines) else 1, job.log())
            for path in (self.output, self.folder / "out.jsonl.job"):
                path.unlink()

    def test_a_signal_finishes_what_runs(self):
        lines = self.write_requests(200, 12)
        for number, to_script in ((signal.SIGTERM, False), (signal.SIGINT, True)):
            before = self.count()
            with self.start(*self.SLOW, ranks=2) as job:
                job.wait_for(lambda: self.count() >= before + 20)
                os.kill(job.process.pid if to_script else job.rank(0), number)
                self.assertEqual(job.wait(), 1, job.log())
                self.assertIn("the same command goes on from here", job.log())
            self.assertLess(self.count(), 200)
        self.assertEqual(self.batch().status, 0)
        self.assert_answers(read_records(self.output), lines)

    def test_a_signal_while_nothing_comes_from_stdin(self):
        process = subprocess.Popen([LOCKSTEP, "batch", self.model, *NULL, "--input", "-", "--output", self.output],
                                   stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        try:
            process.stdin.write(text_of([request(1), request(2)]).encode() + b'{"prompt": [1')
            process.stdin.flush()
            end = time.monotonic() + 30
            while self.count() < 2 and time.monotonic() < end:
                time.sleep(0.01)
            process.terminate()
            self.assertEqual(process.wait(timeout=30), 1)
        finally:
            process.kill()
            process.communicate()
        self.assert_answers(read_records(self.output), [request(1), request(2)])

    def test_failures_are_tried_again_on_request_only(self):
        self.input.write_text("".join(json.dumps({"custom_id": f"r{n}", "prompt": [n] * (n % 2 * 90 + 1), "max_tokens": 2}) + "\n"
                                      for n in range(1, 21)))
        self.assertEqual(self.batch("--max-model-len", 50).status, 1)
        first = {line_of(r): r for r in read_records(self.output)}
        self.assertEqual(self.batch().status, 1)
        self.assertEqual({line_of(r): r for r in read_records(self.output)}, first)
        result = self.batch("--retry-failed", ranks=2)
        self.assertEqual(result.status, 0, result.err)
        self.assertIn("ok 20, failed 0", result.err)
        records = read_records(self.output)
        self.assertEqual(sorted(map(line_of, records)), list(range(1, 21)))
        for record in records:
            self.assertEqual(record["response"]["status_code"], 200)
            if line_of(record) % 2 == 0:
                self.assertEqual(record, first[line_of(record)])

    def test_a_full_disk(self):
        lines = self.write_requests(200)
        with self.start(*self.SLOW) as job:
            job.wait_for(lambda: self.count() >= 20)
            resource.prlimit(job.rank(0), resource.RLIMIT_FSIZE, (self.output.stat().st_size + 1000,) * 2)
            self.assertEqual(job.wait(), 1, job.log())
            self.assertIn("File too large", job.log())
            told = int(re.search(r"info: ok (\d+), failed 0", job.log())[1])
        self.assertTrue(self.output.read_bytes().endswith(b"}\n"), "a half record")
        self.assertEqual(self.count(), told)
        self.assertEqual(self.batch().status, 0)
        self.assert_answers(read_records(self.output), lines)


class RefusedTest(Batches):
    def test_two_writers(self):
        lines = self.write_requests(400, 30)
        with self.start(*ResumeTest.SLOW, "--null-step-ms", 50, ranks=2) as first:
            first.wait_for(lambda: self.count() >= 1)
            started = time.monotonic()
            result = self.batch("--lock-seconds", 1, ranks=2)
            self.assert_refused(result, "another job writes to it", "within 1 s")
            self.assertGreater(time.monotonic() - started, 1)
            with self.start() as third:  # waits until the first has gone
                third.wait_for(lambda: "another job writes to it" in third.log())
                os.kill(first.rank(0), signal.SIGKILL)
                self.assertEqual(third.wait(), 0, third.log())
        self.assert_answers(read_records(self.output), lines)

    def test_another_job_than_the_outputs(self):
        self.write_requests(5)
        self.assertEqual(self.batch().status, 0)
        kept = self.output.read_bytes()
        self.write_requests(6)
        self.assert_refused(self.batch(), "the input", "--force")
        self.write_requests(5)
        self.edit_config(rms_norm_eps=1e-6)
        self.assert_refused(self.batch(ranks=2), "the model", "--force")
        self.assert_refused(self.batch("--dtype", "bfloat16"), "dtype", "the model")
        self.edit_config(rms_norm_eps=1e-5)
        (self.model / "generation_config.json").write_text('{"temperature": 0.5}')
        self.assert_refused(self.batch(), "temperature (0.5, was null)")
        (self.model / "generation_config.json").unlink()
        self.assert_refused(lockstep("batch", self.model, *NULL, "--input", "-", "--output", self.output), "stdin")
        self.assertEqual(self.output.read_bytes(), kept)
        self.write_requests(6)
        self.assertEqual(self.batch("--force").status, 0)
        self.assertEqual(self.count(), 6)

    def test_files_that_are_no_output(self):
        self.write_requests(3)
        kept = self.input.read_bytes()
        os.symlink(self.input, self.folder / "link")
        for output in (self.input, self.folder / "link"):
            self.output = output
            self.assert_refused(self.batch(), "that is read")
        self.assertEqual(self.input.read_bytes(), kept)
        self.output = self.folder / "notes.txt"
        self.output.write_text("my notes\nand more")
        self.assert_refused(self.batch(), "not empty", "notes.txt.job")
        self.assert_refused(self.batch("--force"), "line 1: it is no record")
        self.assertEqual(self.output.read_text(), "my notes\nand more")
        self.output = self.model / "config.json"
        self.assert_refused(self.batch(), "of the model")
        self.output = self.folder / "none" / "out"
        self.assert_refused(self.batch(ranks=2), "No such file")
        self.output = self.folder
        self.assert_refused(self.batch(), "Is a directory")
        self.output, self.input = self.folder / "out", self.folder / "absent"
        self.assert_refused(self.batch(), "absent", "No such file")
        self.assertFalse(self.output.exists())

    def test_options(self):
        for args, message in (((), "--input is missing"), (("--input", "x"), "--output is missing"),
                              (("--input", "x", "--output", "y", "--ordered", "--retry-failed"), "exclude each other"),
                              (("--input", "x", "--output", "-", "--force"), "for files"),
                              (("--input", "x", "--output", "y", "--fsync", "often"), "must be one of")):
            self.assert_refused(lockstep("batch", self.model, *args), message)

    def test_progress(self):
        self.write_requests(56, 20)
        for number, (kind, env, shown, hidden) in enumerate((("plain", {}, "progress: ", "\r"), ("none", {}, "ok 56", "progress: "),
                                         ("auto", {"LOCKSTEP_STDERR_IS_TERMINAL": "0"}, "progress: ", "\r"),
                                         ("auto", {"LOCKSTEP_STDERR_IS_TERMINAL": "1"}, " of 56 lines (", "progress: "))):
            self.output = self.folder / f"out{number}"
            with self.start("--progress", kind, "--fsync", "always", "--max-num-seqs", 8, "--null-step-ms",
                            10 if shown == "progress: " else 1, env=env) as job:
                self.assertEqual(job.wait(), 0, job.log())
                self.assertIn(shown, job.log())
                self.assertNotIn(hidden, job.log())
                self.assertIn("ok 56, failed 0; this run: 56 lines", job.log())


if __name__ == "__main__":
    main()
