#!/usr/bin/env python3
"""What each option of `lockstep generate` does to the answers, from outside the binary.

usage: generate_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only
"""
import json, math, re, signal, subprocess

from command_harness import DUMMY, GREEDY, LOCKSTEP, Commands, lockstep, main, write_tokenizer

PROMPT = ["--ids", "1,2,3"]


def jsonl(*lines):
    return "\n".join(json.dumps(line) for line in lines).encode()


class Answers(Commands):
    def run_lines(self, *lines, args=(), ranks=None):
        """The answers to a prompts file of these lines, read from stdin."""
        result = self.generate("--prompts", "-", "--json", *args, stdin=jsonl(*lines), ranks=ranks)
        self.assertEqual(result.status, 0, result.err)
        return result.json_lines()

    def ids(self, *args, **options):
        return [answer["token_ids"] for answer in self.answers(*args, **options)]


class SamplingTest(Answers):
    def test_choices_are_the_seeds_that_follow(self):
        args = ["--max-tokens", 8, "--temperature", 1.2, "--json"]
        answers = self.answers(*PROMPT, "--n", 3, "--seed", 5, *args)
        self.assertEqual([list(a) for a in answers],
                         3 * [["prompt_index", "choice_index", "prompt_token_ids", "token_ids", "text", "finish_reason"]])
        self.assertEqual([(a["prompt_index"], a["choice_index"]) for a in answers], [(0, 0), (0, 1), (0, 2)])
        alone = self.run_lines(*[{"prompt": [1, 2, 3], "seed": seed} for seed in (5, 6, 7)], args=args)
        self.assertEqual([a["token_ids"] for a in answers], [a["token_ids"] for a in alone])
        self.assertEqual(len({tuple(a["token_ids"]) for a in answers}), 3)
        self.assertEqual(self.answers(*PROMPT, "--n", 3, "--seed", 5, *args, ranks=2), answers)

    def test_choices_without_json_are_told_apart(self):
        ids = self.ids(*PROMPT, "--ids", 9, "--n", 2, "--seed", 1, "--max-tokens", 3, "--json", "--ignore-eos")
        plain = self.generate(*PROMPT, "--ids", 9, "--n", 2, "--seed", 1, "--max-tokens", 3, "--ignore-eos")
        expected = [f"== prompt {i // 2}, choice {i % 2} ==\n{','.join(map(str, ids[i]))}\n" for i in range(4)]
        self.assertEqual(plain.out.decode(), "".join(expected))

    def test_seeds_of_many_answers(self):
        args = ["--n", 2, "--max-tokens", 6, "--temperature", 1.5, "--json", "--ignore-eos"]
        result = self.generate(*PROMPT, *PROMPT, *args)
        ids = [line["token_ids"] for line in result.json_lines()]
        self.assertEqual(len(set(map(tuple, ids))), 4)
        seed = int(re.search(r"seed: (\d+) \+ number of the answer", result.err)[1])
        self.assertEqual(self.ids(*PROMPT, *args, "--seed", (seed + 2) % 2**64), ids[2:])

    def test_logit_bias_forces_and_forbids(self):
        args = [*PROMPT, "--max-tokens", 5, *GREEDY]
        plain = self.ids(*args)[0]
        self.assertEqual(self.ids(*args, "--logit-bias", '{"77": 100}'), [5 * [77]])
        forbidden = self.ids(*args, "--logit-bias", json.dumps({str(i): -100 for i in plain}))[0]
        self.assertFalse(set(forbidden) & set(plain))

    def test_penalties(self):
        """Dummy logits lie within a range of 1: what id 77 gets in favour decides."""
        args = [*PROMPT, "--max-tokens", 12, "--json"]
        lines = [{"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, **more} for more in (
            {}, {"logit_bias": {"77": 3}, "presence_penalty": 2}, {"logit_bias": {"77": 3}, "frequency_penalty": 2},
            {"presence_penalty": 2}, {"repetition_penalty": 5}, {"temperature": 1, "min_p": 1, "seed": 3})]
        plain, presence, frequency, distinct, repetition, min_p = (a["token_ids"] for a in self.run_lines(*lines, args=args[2:]))
        self.assertEqual(presence, 12 * [77])
        self.assertEqual((frequency[:2], frequency.count(77)), ([77, 77], 2))
        self.assertEqual(len(set(distinct)), 12)
        self.assertEqual(len(set(repetition) | {1, 2, 3}), 15)
        self.assertEqual(min_p, plain)  # nothing is as likely as the most likely token
        options = [*args, "--temperature", 0, "--ignore-eos"]
        self.assertEqual(self.ids(*options, "--logit-bias", '{"77": 3}', "--frequency-penalty", 2), [frequency])
        self.assertEqual(self.ids(*options, "--presence-penalty", 2, ranks=2), [distinct])
        self.assertEqual(self.ids(*options, "--repetition-penalty", 5, ranks=2), [repetition])
        self.assertEqual(self.ids(*args, "--ignore-eos", "--temperature", 1, "--min-p", 1, "--seed", 3), [min_p])

    def test_ends_and_min_tokens(self):
        args = [*PROMPT, "--max-tokens", 10, *GREEDY]
        plain = self.ids(*args, "--ignore-eos")[0]
        place = next(i for i in range(2, 10) if plain[i] not in plain[:i])
        end = plain[place]
        stopped = self.answers(*args, "--stop-token-ids", f"300,{end}")[0]
        self.assertEqual((stopped["token_ids"], stopped["finish_reason"]), (plain[:place], "stop"))
        self.edit_config(eos_token_id=end)
        self.assertEqual(self.ids(*args), [plain[:place]])
        for more in ([], ["--stop-token-ids", end, "--ignore-eos"]):
            least = self.ids(*args, *more, "--min-tokens", 7)[0]
            self.assertEqual(least[:place], plain[:place])
            self.assertGreaterEqual(len(least), 7)
            self.assertNotIn(end, least)

    def test_stop_strings_and_min_tokens(self):
        write_tokenizer(self.model)
        args = ["--prompt", "x", "--max-tokens", 40, "--logit-bias", '{"97": 20, "98": 20.5}', "--frequency-penalty", 0.2, *GREEDY]
        text = self.answers(*args)[0]["text"]
        self.assertEqual(set(text), {"a", "b"})
        for least in (1, 7, 20):
            answer = self.answers(*args, "--stop", "ab", "--min-tokens", least)[0]
            self.assertEqual((answer["text"], answer["finish_reason"]), (text[:text.index("ab", least)], "stop"))

    def test_logprobs(self):
        write_tokenizer(self.model)
        args = ["--ids", "1,2,3,250", "--max-tokens", 6, "--ignore-eos", *GREEDY]
        answer = self.answers(*args, "--logprobs", 4, "--prompt-logprobs", 2)[0]
        self.assertEqual(list(answer)[-2:], ["logprobs", "prompt_logprobs"])
        self.assertEqual([answer["token_ids"]], self.ids(*args))
        self.assertEqual([entry["token_id"] for entry in answer["logprobs"]], answer["token_ids"])
        self.assertIsNone(answer["prompt_logprobs"][0])
        self.assertEqual([entry["token_id"] for entry in answer["prompt_logprobs"][1:]], [2, 3, 250])
        for entry in answer["logprobs"] + answer["prompt_logprobs"][1:]:
            top = [t["logprob"] for t in entry["top"]]
            self.assertEqual(top, sorted(top, reverse=True))
            self.assertLessEqual(max(top + [entry["logprob"]]), 0)
            self.assertLessEqual(sum(map(math.exp, top)), 1)
            self.assertLessEqual(entry["logprob"], top[0])
            for token in [entry, *entry["top"]]:
                text = bytes([token["token_id"]]).decode(errors="replace") if token["token_id"] < 256 else None
                if text is not None:
                    self.assertEqual(token["token"], text)
        for entry in answer["logprobs"]:  # greedy
            self.assertEqual({k: entry[k] for k in ("token_id", "token", "logprob")}, entry["top"][0])
            self.assertEqual(len(entry["top"]), 4)
        self.assertEqual([len(entry["top"]) for entry in answer["prompt_logprobs"][1:]], 3 * [2])
        # What the model itself thinks of the whole text.
        sequence = [1, 2, 3, 250, *answer["token_ids"]]
        score = lockstep("score", self.model, *DUMMY, "--ids", ",".join(map(str, sequence))).json_lines()[0]
        got = [entry["logprob"] for entry in answer["prompt_logprobs"][1:] + answer["logprobs"]]
        for ours, theirs in zip(got, score["token_logprobs"][1:], strict=True):
            self.assertAlmostEqual(ours, theirs, delta=1e-5)
        # The model's own probabilities, whatever changes the logits; prompts are on the first choice alone.
        biased = self.answers(*args, "--n", 2, "--logit-bias", '{"77": 100}', "--logprobs", 0, "--prompt-logprobs", 0, ranks=2)
        self.assertEqual(["prompt_logprobs" in b for b in biased], [True, False])
        self.assertEqual([entry["top"] for entry in biased[1]["logprobs"]], 6 * [[]])
        self.assertLess(biased[1]["logprobs"][0]["logprob"], -4)
        for ours, theirs in zip(biased[0]["prompt_logprobs"][1:], answer["prompt_logprobs"][1:], strict=True):
            self.assertAlmostEqual(ours["logprob"], theirs["logprob"], delta=1e-5)

    def test_refused_before_the_model_is_loaded(self):
        cases = [(["--logit-bias", '{"320": 1}'], "320 is outside the vocabulary of 320"),
                 (["--stop-token-ids", "5,321"], "321 is outside the vocabulary"),
                 (["--min-tokens", 9, "--max-tokens", 8], "--min-tokens 9 is more than --max-tokens 8"),
                 (["--logprobs", 129, "--json"], "between 0 and 128"),
                 (["--max-model-len", 3], "the prompt has 3 tokens")]
        for i, (args, message) in enumerate(cases):
            result = self.generate(*PROMPT, *args, ranks=2 if i == 0 else None)
            self.assert_refused(result, message)
            self.assertNotIn("KV cache", result.err)


class PromptsFileTest(Answers):
    def test_overrides_are_as_if_given_alone(self):
        lines = [{"prompt": [1, 2, 3]},
                 {"prompt": [9], "max_tokens": 4, "temperature": 0},
                 {"prompt": "hé", "seed": 8, "top_k": 5, "top_p": 0.9, "priority": -1, "cache_salt": "a"},
                 {"prompt": [1, 2, 3], "n": 2, "logprobs": 1, "repetition_penalty": 1.5, "ignore_eos": True},
                 {"prompt": "x", "stop": ["\x01", "q"], "min_tokens": 3, "stop_token_ids": [5], "logit_bias": {"7": 2}}]
        write_tokenizer(self.model)
        common = ["--max-tokens", 9, "--seed", 4, "--json"]
        alone = [["--ids", "1,2,3"],
                 ["--ids", 9, "--max-tokens", 4, "--temperature", 0],
                 ["--prompt", "hé", "--seed", 8, "--top-k", 5, "--top-p", 0.9],
                 ["--ids", "1,2,3", "--n", 2, "--logprobs", 1, "--repetition-penalty", 1.5, "--ignore-eos"],
                 ["--prompt", "x", "--stop", "\x01", "--stop", "q", "--min-tokens", 3, "--stop-token-ids", 5, "--logit-bias",
                  '{"7": 2}']]
        together = self.run_lines(*lines, args=common)
        expected = []
        for i, args in enumerate(alone):
            expected += [{**answer, "prompt_index": i} for answer in self.answers(*common, *args)]
        self.assertEqual(together, expected)
        file = self.folder / "in.jsonl"
        file.write_bytes(b"\xef\xbb\xbf" + jsonl(*lines[:2]).replace(b"\n", b"\r\n\r\n"))
        self.assertEqual(self.answers("--prompts", file, *common, ranks=2), together[:2])
        mixed = self.answers("--ids", 9, "--prompts", file, "--ids", 7, *common)
        self.assertEqual([answer["prompt_token_ids"] for answer in mixed], [[9], [1, 2, 3], [9], [7]])

    def test_chat(self):
        write_tokenizer(self.model)
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</turn>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
        (self.model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
        answers = self.run_lines({"prompt": "hi"}, {"messages": messages}, args=["--chat", "--max-tokens", 1])
        self.assertEqual([a["prompt_token_ids"] for a in answers],
                         [[*b"user: hi", 301, *b"A:"], [*b"system: s", 301, *b"user: hi", 301, *b"A:"]])
        for line, chat, message in (({"messages": messages}, [], "messages need --chat"), ({"prompt": [1]}, ["--chat"], "list of ids")):
            self.assert_refused(self.generate("--prompts", "-", *chat, stdin=jsonl(line)), "stdin line 1: ", message)

    def test_bad_lines_are_refused_by_name(self):
        file = self.folder / "in.jsonl"
        good = {"prompt": [1]}
        cases = [({"prompt": [1], "max_new_tokens": 3}, "unknown key 'max_new_tokens'"),
                 ({"prompt": [1, 320]}, "token 1 of the prompt is 320"),
                 ({"prompt": []}, "the prompt is empty"),
                 ({"prompt": list(range(300))}, "the prompt has 300 tokens"),
                 ({"prompt": [1], "temperature": -1}, "temperature is -1"),
                 ({"prompt": [1], "min_tokens": 200}, "min_tokens is 200"),
                 ({"prompt": [1], "logprobs": 1}, "need --json"),
                 ({"prompt": [1], "stop": "x"}, "stop needs a tokenizer"),
                 ({"prompt": "x"}, "needs a tokenizer")]
        for i, (line, message) in enumerate(cases):
            file.write_bytes(jsonl(good, line))
            result = self.generate("--prompts", file, "--max-model-len", 200, ranks=2 if i == 1 else None)
            self.assert_refused(result, f"{file} line 2: ", message)
            self.assertNotIn("KV cache", result.err)
        # Too long for the KV blocks, which is known once they are there.
        file.write_bytes(jsonl(good, {"prompt": list(range(100))}))
        self.assert_refused(self.generate("--prompts", file, "--num-gpu-blocks-override", 4), f"{file} line 2: ", "100 tokens", "64")
        self.assert_refused(self.generate("--prompts", self.folder / "none", ranks=2), "none: No such file")

    def test_order_of_answers_and_of_work(self):
        """Answers come in the order of the prompts, while the engine gets them by priority and a few at a time."""
        log = self.folder / "steps.jsonl"
        lines = [{"prompt": [i + 1, 5], "priority": -i} for i in range(9)]
        args = ["--temperature", 0, "--ignore-eos", "--max-tokens", 2]
        answers = self.run_lines(*lines, args=[*args, "--max-num-seqs", 1, "--step-log", log])
        self.assertEqual([a["prompt_index"] for a in answers], list(range(9)))
        self.assertEqual(answers, self.run_lines(*lines, args=args))
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        self.assertEqual([step["requests"][0]["id"] for step in steps], [i for i in range(1, 10) for _ in range(2)])
        self.assertEqual(max(step["waiting"] for step in steps), 1)  # two at a time
        plain = self.generate("--prompts", "-", *args, stdin=jsonl(*lines))
        self.assertEqual(plain.out.decode(), "".join(",".join(map(str, a["token_ids"])) + "\n" for a in answers))


class EngineOptionsTest(Answers):
    MANY = [argument for i in range(8) for argument in ("--ids", f"{i + 1},2,3,4,5,6")]

    def test_preemption_changes_nothing(self):
        """Eight answers need 8 * 10 blocks of 4 tokens, and get 16."""
        args = [*self.MANY, "--max-tokens", 32, "--ignore-eos", "--temperature", 0.8, "--seed", 3, "--json", "--block-size", 4]
        first = self.answers(*args)
        for ranks in (None, 2):
            result = self.generate(*args, "--num-gpu-blocks-override", 16, "--poison-freed-blocks", ranks=ranks)
            self.assertEqual(result.json_lines(), first, result.err)
            self.assertGreater(int(re.search(r"preemptions: (\d+)", result.err)[1]), 0)

    def test_prefix_cache(self):
        prompt = ",".join(map(str, range(1, 40)))
        args = ["--ids", prompt, "--ids", prompt + ",7", "--max-num-seqs", 1, "--max-tokens", 4, "--ignore-eos", *GREEDY]
        shared = self.generate(*args)
        # Two full blocks of 16 were there when the second prompt came.
        self.assertRegex(shared.err, r"prefix cache: 32 of \d+ tokens")
        alone = self.generate(*args, "--no-enable-prefix-caching")
        self.assertNotIn("prefix cache", alone.err)
        self.assertNotIn("preemptions", alone.err)
        self.assertEqual(shared.json_lines(), alone.json_lines())
        self.assertIn("prefill: 79 tokens", alone.err)
        self.assertIn("prefill: 47 tokens", shared.err)

    def test_step_log(self):
        log = self.folder / "steps.jsonl"
        args = [*self.MANY, "--max-tokens", 5, "--ignore-eos", "--max-num-batched-tokens", 20, "--seed", 1, "--json"]
        ids = self.ids(*args, "--step-log", log, ranks=2)
        self.assertEqual(ids, self.ids(*args))
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        self.assertEqual([step["step"] for step in steps], list(range(1, len(steps) + 1)))
        for step in steps:
            self.assertLessEqual(step["tokens"], 20)
            for key in ("tokens", "prompt_tokens"):
                self.assertEqual(step[key], sum(request[key] for request in step["requests"]))
        # The last token of an answer is not computed.
        self.assertEqual(sum(step["tokens"] for step in steps), 8 * (6 + 5 - 1))
        self.assertEqual(sum(step["prompt_tokens"] for step in steps), 8 * 6)
        link = self.folder / "link"
        link.symlink_to((self.model / "config.json").resolve())
        for target in (self.model / "config.json", link, self.folder / "none/steps"):
            self.assert_refused(self.generate(*PROMPT, "--step-log", target), str(target))
        self.assertTrue((self.model / "config.json").read_text().startswith("{"))

    def test_blocks_and_lengths(self):
        answer = self.answers(*PROMPT, "--num-gpu-blocks-override", 2, "--block-size", 4, "--max-tokens", 50, "--ignore-eos", *GREEDY)[0]
        self.assertEqual((len(answer["token_ids"]), answer["finish_reason"]), (5, "length"))
        # Memory of the host: a token takes 2 layers * 2 * 8 values of 4 bytes for each KV head, and 3 KV heads are 2 + 1 on two
        # ranks or 3 on one.
        one, two = (self.generate(*PROMPT, "--kv-cache-memory", "1M", "--max-tokens", 1, ranks=ranks).err for ranks in (None, 2))
        tokens = [int(re.search(r"KV cache: \d+ blocks of 16 tokens = (\d+) tokens", err)[1]) for err in (one, two)]
        self.assertEqual(tokens[0], 2**20 // (16 * 384) * 16)
        self.assertEqual(tokens[1], 2**19 // (16 * 256) * 16)

    def test_interrupt(self):
        """Ctrl-C ends what runs, and what is there is printed: exit 1."""
        self.edit_config(max_position_embeddings=2000000)
        args = ["generate", self.model, *DUMMY, *PROMPT, *PROMPT, "--max-tokens", 1000000, "--ignore-eos", "--max-num-seqs", 1,
                "--kv-cache-memory", "512M", "--json", "--step-log", self.folder / "steps"]
        process = subprocess.Popen([LOCKSTEP, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            while not (self.folder / "steps").exists() or (self.folder / "steps").stat().st_size < 1000:
                self.assertIsNone(process.poll())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        self.assertEqual(process.returncode, 1, err)
        answers = [json.loads(line) for line in out.splitlines()]
        self.assertEqual([a["finish_reason"] for a in answers], 2 * ["cancelled"])
        self.assertGreater(len(answers[0]["token_ids"]), 0)
        self.assertEqual(answers[1]["token_ids"], [])
        self.assertIn(b"interrupted: 2 of 2 answers are incomplete", err)


if __name__ == "__main__":
    main()
