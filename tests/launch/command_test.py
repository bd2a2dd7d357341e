#!/usr/bin/env python3
"""The commands as a user sees them: exit statuses, what is on stdout and what on stderr, at 1, 2 and 3 ranks.

usage: command_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only
"""
import array, json, math, os, pathlib, signal, struct, subprocess, time

from command_harness import (DUMMY, GREEDY, LOCKSTEP, RUN, Commands, Result, lockstep, main, write_tokenizer, write_weights)


class CommandLineTest(Commands):
    def test_help_and_version_need_nothing(self):
        for args in (["help"], ["--help"], ["help", "generate"], ["score", "--help"], ["version"], ["--version"]):
            result = lockstep(*args)
            self.assertEqual((result.status, result.err), (0, ""), args)
            self.assertTrue(result.out.endswith(b"\n"))
        version = lockstep("version", "--json").json_lines()
        self.assertEqual(len(version), 1)
        self.assertIn("open_mpi", version[0]["libraries"])
        self.assertIn(version[0]["cuda"], (False, True))

    def test_one_copy_of_the_help_under_mpirun(self):
        result = lockstep("help", ranks=2)
        self.assertEqual(result.status, 0)
        self.assertEqual(result.out.count(b"Usage:"), 1)

    def test_usage_errors_are_told_once(self):
        for ranks in (None, 1, 3):
            self.assert_refused(lockstep("generate", self.model, "--max-token", 5, ranks=ranks), "did you mean --max-tokens?",
                                "lockstep help generate")
        self.assert_refused(lockstep(), "no command given")
        self.assert_refused(lockstep("serv"), "there is no command 'serv'")
        self.assert_refused(self.generate("--ids", "1,,2"), "--ids 1,,2: entry 2 is ''")

    def test_device(self):
        with_cuda = lockstep("version", "--json").json_lines()[0]["cuda"]
        reason = "no GPU is visible" if with_cuda else "built without CUDA"
        self.assert_refused(self.generate("--ids", "1", "--device", "cuda"), reason)
        self.assert_refused(self.generate("--ids", "1", "--device", "cuda", ranks=2), reason)
        for ranks in (None, 2):
            result = self.generate("--ids", "1", "--max-tokens", 2, "--device", "auto", ranks=ranks)
            self.assertEqual(result.status, 0, result.err)
            self.assertEqual("device: cpu, because of rank 0: no GPU is visible" in result.err, with_cuda, result.err)

    def test_rank_counts(self):
        self.assert_refused(self.generate("--ids", 1, "--tp", 2), "--tp 2", "1 rank")
        self.assert_refused(self.generate("--ids", 1, "--tp", 3, ranks=2), "--tp 3", "2 ranks")
        self.assert_refused(self.generate("--ids", 1, ranks=7), "7", "6")  # query heads

    def test_stdout_that_cannot_be_written(self):
        with open("/dev/full", "wb") as full:
            for args in (["help"], ["version"], ["generate", self.model, *DUMMY, "--ids", 1, "--max-tokens", 3]):
                result = lockstep(*args, stdout=full)
                self.assertEqual(result.status, 1, result.err)
                self.assertEqual(len(result.errors()), 1, result.err)
                self.assertIn("No space left", result.err)

    def test_closed_stdout(self):
        script = f'"{LOCKSTEP}" generate "{self.model}" --load-format dummy --ids 1 --max-tokens 5 --json >&-'
        result = Result(subprocess.run(["bash", "-c", script], capture_output=True, timeout=60))
        self.assertEqual(result.status, 1, result.err)
        self.assertIn("cannot write to standard output", result.err)

    def test_a_reader_that_leaves_is_no_error(self):
        args = ["generate", str(self.model), *DUMMY, "--ids", "1", "--max-tokens", "4000", "--ignore-eos", "--log-level", "warning"]
        for command in ([LOCKSTEP, *args], ["bash", str(RUN), "-n", "2", *args]):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       env=dict(os.environ, LOCKSTEP=LOCKSTEP))
            self.assertNotEqual(process.stdout.read(4), b"")
            process.stdout.close()
            err = process.stderr.read()
            process.stderr.close()
            if command[0] == LOCKSTEP:  # mpirun reads to the end by itself, and complains by itself
                self.assertEqual((process.wait(60), err), (0, b""))
            else:
                process.wait(60)


class GenerateTest(Commands):
    def test_json_shape_and_equal_ids_at_all_rank_counts(self):
        args = ["--ids", "1,2,3", "--ids", "9", "--max-tokens", 24, *GREEDY]
        first = self.answers(*args)
        self.assertEqual([list(line) for line in first],
                         2 * [["prompt_index", "prompt_token_ids", "token_ids", "text", "finish_reason"]])
        self.assertEqual([line["prompt_index"] for line in first], [0, 1])
        self.assertEqual([line["prompt_token_ids"] for line in first], [[1, 2, 3], [9]])
        self.assertEqual([len(line["token_ids"]) for line in first], [24, 24])
        self.assertEqual([line["text"] for line in first], [None, None])
        self.assertEqual([line["finish_reason"] for line in first], ["length", "length"])
        for ranks in (1, 2, 3):
            self.assertEqual(self.answers(*args, ranks=ranks), first, ranks)

    def test_chunks_threads_and_blocks_do_not_change_ids(self):
        args = ["--ids", ",".join(map(str, range(1, 40))), "--max-tokens", 12, *GREEDY]
        first = self.answers(*args)
        for more in (["--max-num-batched-tokens", 7], ["--threads", 2], ["--block-size", 4], ["--max-num-seqs", 1],
                     ["--kv-cache-memory", "1M", "--max-model-len", 64]):
            self.assertEqual(self.answers(*args, *more), first, more)

    def test_neighbours_do_not_change_an_answer(self):
        prompts = ["5,6,7", "1", "8,9,10,11,12"]
        for sampling in (["--temperature", 0], ["--temperature", 0.9, "--seed", 7]):
            together = self.answers(*[a for p in prompts for a in ("--ids", p)], "--max-tokens", 10, "--json", *sampling)
            alone = [self.answers("--ids", p, "--max-tokens", 10, "--json", *sampling)[0] for p in prompts]
            self.assertEqual([t["token_ids"] for t in together], [a["token_ids"] for a in alone])

    def test_messages_go_to_stderr(self):
        # The seed is a random one: without --ignore-eos some draws end early.
        result = self.generate("--ids", 1, "--max-tokens", 4, "--ignore-eos", ranks=2)
        self.assertEqual(result.status, 0)
        self.assertEqual(len(result.out.decode().strip().split(",")), 4)  # ids, as there is no tokenizer
        for piece in ("sampling: temperature 0.7 (built in)", "load:", "2 ranks", "prefill:", "time to first token", "decode:",
                      "seed:", "no tokenizer"):
            self.assertEqual(result.err.count(piece), 1, result.err)
        quiet = self.generate("--ids", 1, "--max-tokens", 4, "--log-level", "warning")
        self.assertEqual(quiet.err, "")

    def test_seeds(self):
        args = ["--ids", 1, "--max-tokens", 16, "--temperature", 1.5, "--json"]
        a, b = (self.answers(*args, "--seed", 5)[0]["token_ids"] for _ in range(2))
        self.assertEqual(a, b)
        self.assertNotEqual(a, self.answers(*args, "--seed", 6)[0]["token_ids"])
        self.assertEqual(a, self.answers(*args, "--seed", 5, ranks=3)[0]["token_ids"])
        result = self.generate(*args)
        seed = result.err.split("seed: ")[1].split()[0]
        self.assertEqual(result.json_lines(), self.answers(*args, "--seed", seed))

    def test_limits_of_length(self):
        answer = self.answers("--ids", "1,2,3", "--max-model-len", 8, "--max-tokens", 100, *GREEDY)[0]
        self.assertEqual((len(answer["token_ids"]), answer["finish_reason"]), (5, "length"))
        for ranks in (None, 2):
            self.assert_refused(self.generate("--ids", "1,2,3", "--max-model-len", 3, ranks=ranks), "3")
            self.assert_refused(self.generate("--ids", "1", "--ids", "1,320", ranks=ranks), "prompt 1", "320")

    def test_text_prompts_and_output(self):
        write_tokenizer(self.model)
        args = ["--max-tokens", 40, "--temperature", 0]
        answer = self.answers("--prompt", "[hé]\n", "--json", *args)[0]
        self.assertEqual(answer["prompt_token_ids"], [300, *"[hé]\n".encode()])
        ids = [i for i in answer["token_ids"] if i < 256]  # ids of no token and special tokens add no text
        self.assertEqual(answer["text"], bytes(ids).decode(errors="replace"))
        for ranks in (None, 2):
            plain = self.generate("--prompt", "[hé]\n", *args, ranks=ranks)
            self.assertEqual(plain.out.decode(), answer["text"] + "\n")
        file = self.folder / "prompt"
        file.write_bytes(b" a\r\n\n")
        answers = self.answers("--prompt-file", file, "--ids", 7, "--prompt", "z", "--json", *args)
        self.assertEqual([a["prompt_token_ids"] for a in answers], [[300, *b" a\r\n\n"], [7], [300, *b"z"]])
        several = self.generate("--prompt-file", file, "--ids", 7, "--prompt", "z", *args)
        self.assertEqual(several.out.decode(), "".join(a["text"] + "\n" for a in answers))

    def test_stop_strings(self):
        write_tokenizer(self.model)
        args = ["--prompt", "x", "--max-tokens", 60, *GREEDY]
        text = self.answers(*args)[0]["text"]
        stop = text[10:12]
        answer = self.answers(*args, "--stop", "never there", "--stop", stop)[0]
        self.assertEqual((answer["text"], answer["finish_reason"]), (text[:text.index(stop)], "stop"))
        self.assertLess(len(answer["token_ids"]), 60)

    def test_chat(self):
        write_tokenizer(self.model)
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</turn>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
        self.assert_refused(self.generate("--prompt", "hi", "--chat"), "chat template")
        (self.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<s>"}))
        answer = self.answers("--prompt", "hi", "--chat", "--max-tokens", 1, *GREEDY)[0]
        self.assertEqual(answer["prompt_token_ids"], [*b"user: hi", 301, *b"A:"])
        (self.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ raise_exception('Not like this.') }}"}))
        self.assert_refused(self.generate("--prompt", "hi", "--chat", ranks=2), "Not like this.")

    def test_a_prompt_that_meets_nan_fails_alone(self):
        """Zeros for weights, but for the NaN in the embedding of token 7: exit 1, and the other prompt is answered."""
        write_weights(self.model, lambda name, count: [math.nan if name == "model.embed_tokens.weight" and i // 48 == 7 else 0.0
                                                       for i in range(count)])
        for ranks in (1, 2):
            result = lockstep("generate", f"{self.model}/", "--ids", 7, "--ids", 1, "--max-tokens", 2, *GREEDY, ranks=ranks)
            self.assertEqual(result.status, 1, result.err)
            self.assertEqual([(line["token_ids"], line["finish_reason"]) for line in result.json_lines()],
                             [([], "error"), ([0, 0], "length")])
            self.assertEqual(result.errors(), ["lockstep error: prompt 0: the logits of position 0 hold NaN or infinity"])

    def test_prompts_that_are_refused(self):
        self.assert_refused(self.generate("--prompt", "x", ranks=2), "tokenizer", str(self.model))
        self.assert_refused(self.generate("--ids", "1", "--stop", "x"), "--stop", "tokenizer")
        write_tokenizer(self.model)
        file = self.folder / "prompt"
        self.assert_refused(self.generate("--prompt-file", file, ranks=2), str(file))
        file.write_bytes(b"ab\xff")
        self.assert_refused(self.generate("--prompt-file", file), str(file), "2")
        file.write_bytes(b"")
        self.assert_refused(self.generate("--prompt-file", file), "empty")
        write_tokenizer(self.model, normalizer={"type": "Nonsense"})
        self.assert_refused(self.generate("--ids", 1), "Nonsense", "tokenizer.json")

    def test_generation_config(self):
        """Several end ids, and sampling values that the command line overrides."""
        path = self.model / "generation_config.json"
        args = ["--ids", "1,2,3", "--max-tokens", 8, "--json"]
        plain = self.answers(*args, "--temperature", 0)[0]["token_ids"]
        stop = next(i for i in range(1, 8) if plain[i] not in plain[:i])  # the first time this id comes
        end = plain[stop]
        unused = next(i for i in range(320) if i not in plain)

        def check(eos_file, eos_config, *more, ids, reason):
            path.unlink(missing_ok=True)
            if eos_file is not None:
                path.write_text(json.dumps(eos_file))
            self.edit_config(eos_token_id=eos_config)
            answer = self.answers(*args, "--temperature", 0, *more)[0]
            self.assertEqual((answer["token_ids"], answer["finish_reason"]), (ids, reason))

        both = {"eos_token_id": [unused, end], "temperature": 0.1, "top_k": 1, "min_p": 0.01}
        check(both, unused, ids=plain[:stop], reason="stop")
        check({"eos_token_id": end}, unused, ids=plain[:stop], reason="stop")
        check({"eos_token_id": unused}, end, ids=plain[:stop], reason="stop")
        check({}, end, ids=plain[:stop], reason="stop")
        check(None, [unused, end], ids=plain[:stop], reason="stop")
        check(None, unused, ids=plain, reason="length")
        check(both, end, "--ignore-eos", ids=plain, reason="length")
        check({"eos_token_id": end}, unused, "--generation-config", "none", ids=plain, reason="length")
        check({"eos_token_id": unused}, end, "--generation-config", "none", ids=plain[:stop], reason="stop")

        path.write_text(json.dumps(both))
        result = self.generate(*args)
        self.assertEqual(result.json_lines()[0]["token_ids"], plain[:stop])  # top_k 1 is greedy
        self.assertIn("temperature 0.1 (generation_config.json)", result.err)
        self.assertIn("top_k 1 (generation_config.json)", result.err)
        self.assertIn("min_p 0.01 (generation_config.json)", result.err)
        path.write_text(json.dumps({"repetition_penalty": 5.0, "temperature": 0}))
        penalized = self.answers(*args, "--ignore-eos")[0]["token_ids"]
        self.assertEqual(len(set(penalized) | {1, 2, 3}), 8 + 3)  # none comes twice, none is of the prompt
        self.assertEqual(self.answers(*args, "--ignore-eos", "--repetition-penalty", 1)[0]["token_ids"], plain)
        path.write_text(json.dumps({"do_sample": False, "temperature": 5.0}))
        self.assertEqual(self.answers(*args, "--ignore-eos")[0]["token_ids"], plain)
        path.write_text(json.dumps({"temperature": -1}))
        self.assert_refused(self.generate(*args, ranks=2), "generation_config.json", "temperature")
        self.answers(*args, "--generation-config", "none")
        path.write_text("{")
        self.assert_refused(self.generate(*args), "generation_config.json")
        self.answers(*args, "--generation-config", "none")

    def test_a_killed_rank_ends_the_job(self):
        args = ["generate", self.model, *DUMMY, "--ids", 1, "--max-tokens", 1000000, "--ignore-eos", "--temperature", 0]
        self.edit_config(max_position_embeddings=2000000)
        process = subprocess.Popen(["bash", str(RUN), "-n", "3", *map(str, args), "--kv-cache-memory", "512M"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, LOCKSTEP=LOCKSTEP))
        try:
            process.stdout.read(10)  # it answers: all ranks are at work
            ranks = self.processes()
            self.assertEqual(sorted(ranks), [0, 1, 2])
            os.kill(ranks[1], signal.SIGKILL)
            started = time.monotonic()
            process.communicate(timeout=30)
            self.assertLess(time.monotonic() - started, 5)
            self.assertNotEqual(process.returncode, 0)
            self.assertEqual(self.processes(), {})
        finally:
            for pid in self.processes().values():
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def processes(self):
        """Process number of each living rank that runs on this test's model."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and str(self.model).encode() in (entry / "cmdline").read_bytes() \
                        and os.readlink(entry / "exe") == os.path.realpath(LOCKSTEP):
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    rank = next(e for e in environment if e.startswith(b"OMPI_COMM_WORLD_RANK="))
                    found[int(rank.split(b"=")[1])] = int(entry.name)
            except (OSError, StopIteration):
                continue  # it ended while we looked
        return found


class BadModelTest(Commands):
    def refuse(self, *pieces, args=()):
        """Under two ranks, with and without a rank count that would matter: one message, exit 2."""
        started = time.monotonic()
        self.assert_refused(lockstep("generate", self.model, "--ids", 1, *args, ranks=2), *pieces)
        self.assertLess(time.monotonic() - started, 10)

    def test_missing_pieces(self):
        self.refuse(str(self.model))  # no weights
        (self.model / "config.json").write_text("{ not json")
        self.refuse("config.json")
        (self.model / "config.json").unlink()
        self.refuse("config.json")
        self.model.rmdir()
        self.refuse(str(self.model))

    def test_a_fault_on_one_rank_is_told_as_its_own(self):
        wrapper = self.folder / "lockstep"  # rank 1 looks for the model in another folder
        wrapper.write_text(f'#!/bin/sh\n[ "$OMPI_COMM_WORLD_RANK" = 1 ] && cd /\nexec "{LOCKSTEP}" "$@"\n')
        wrapper.chmod(0o755)
        command = ["bash", str(RUN), "-n", "3", "generate", "model", *DUMMY, "--ids", "1"]
        result = Result(subprocess.run(command, cwd=self.folder, env=dict(os.environ, LOCKSTEP=str(wrapper)), timeout=60,
                                       stdin=subprocess.DEVNULL, capture_output=True))
        self.assert_refused(result, "rank 1 (", "model")

    def test_unknown_architecture(self):
        self.edit_config(architectures=["BertModel"], model_type="bert")
        self.refuse("BertModel", args=DUMMY)

    def test_broken_checkpoints(self):
        """One message with path and reason, whatever is broken."""
        path = self.model / "model.safetensors"
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
        tensor = {"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}

        def file(header, data=bytes(16)):
            text = json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text + data

        cases = {
            "LFS": pointer,
            "empty": b"",
            "short": file(tensor)[:-1],
            "long": file(tensor) + bytes(8),
            "header length 0": struct.pack("<Q", 0) + bytes(100),
            "header longer than file": struct.pack("<Q", 1 << 40) + bytes(100),
            "not JSON": struct.pack("<Q", 4) + b"oops" + bytes(16),
            "overlap": file({"x": tensor["x"], "y": tensor["x"]}),
            "span": file({"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 16]}}),
        }
        for name, content in cases.items():
            with self.subTest(name):
                path.write_bytes(content)
                self.refuse("model.safetensors")
        path.write_bytes(pointer)
        self.refuse("LFS")


class ScoreTest(Commands):
    def score(self, *args, ranks=None):
        result = lockstep("score", self.model, *DUMMY, *args, ranks=ranks)
        self.assertEqual(result.status, 0, result.err)
        self.assertEqual(len(result.json_lines()), 1)
        return result.json_lines()[0]

    def logits(self, path):
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + length])["logits"]
        self.assertEqual(header["dtype"], "F32")
        values = array.array("f", data[8 + length:])
        rows, cols = header["shape"]
        self.assertEqual(len(values), rows * cols)
        return [values[r * cols:(r + 1) * cols] for r in range(rows)]

    def test_shape_and_values(self):
        ids = [1, 2, 3, 250, 7, 7, 19, 4, 5, 11]
        out = self.folder / "logits.safetensors"
        args = ["--ids", ",".join(map(str, ids)), "--logits-out", out]
        first = self.score(*args)
        self.assertEqual(list(first), ["num_tokens", "token_logprobs", "perplexity"])
        self.assertEqual(first["num_tokens"], len(ids))
        self.assertIsNone(first["token_logprobs"][0])
        rows = self.logits(out)
        self.assertEqual((len(rows), len(rows[0])), (len(ids), 320))
        expected = [rows[i][ids[i + 1]] - max(rows[i]) - math.log(sum(math.exp(x - max(rows[i])) for x in rows[i]))
                    for i in range(len(ids) - 1)]
        for got, want in zip(first["token_logprobs"][1:], expected, strict=True):
            self.assertAlmostEqual(got, want, delta=1e-9)
        self.assertAlmostEqual(first["perplexity"], math.exp(-sum(expected) / len(expected)), delta=1e-6)
        for more, ranks in ((["--max-num-batched-tokens", 3], None), ([], 2), (["--max-num-batched-tokens", 4], 3)):
            again = self.score(*args, *more, ranks=ranks)
            for got, want in zip(again["token_logprobs"][1:], expected, strict=True):
                self.assertAlmostEqual(got, want, delta=1e-4)
            for got, want in zip(self.logits(out), rows, strict=True):
                self.assertLess(max(abs(a - b) for a, b in zip(got, want)), 1e-4)
        self.assertEqual(sorted(os.listdir(self.folder)), ["logits.safetensors", "model"])  # no temporary file

    def test_one_token(self):
        self.assertEqual(self.score("--ids", 5), {"num_tokens": 1, "token_logprobs": [None], "perplexity": None})

    def test_text_file(self):
        file = self.folder / "text"
        file.write_bytes(b"hello")
        self.assert_refused(lockstep("score", self.model, *DUMMY, "--text-file", file, ranks=2), "tokenizer")
        write_tokenizer(self.model)
        got = self.score("--text-file", file)
        self.assertEqual(got, self.score("--ids", "300," + ",".join(map(str, b"hello"))))

    def test_refusals(self):
        self.assert_refused(lockstep("score", self.model, *DUMMY), "--ids or --text-file")
        self.assert_refused(lockstep("score", self.model, *DUMMY, "--ids", "1,999", ranks=2), "999")
        for target in (self.folder / "none/x.safetensors", self.folder):
            self.assert_refused(lockstep("score", self.model, *DUMMY, "--ids", "1", "--logits-out", target, ranks=2), str(target))
        config = self.model / "config.json"
        self.assert_refused(lockstep("score", self.model, *DUMMY, "--ids", "1", "--logits-out", config), "a file of the model")
        self.assertTrue(config.read_text().startswith("{"))

    def test_fifo_in_the_model_folder_does_not_hang(self):
        os.mkfifo(self.model / "generation_config.json")
        self.assert_refused(lockstep("score", self.model, *DUMMY, "--ids", "1", ranks=2), "regular file")


if __name__ == "__main__":
    main()
