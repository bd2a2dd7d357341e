#!/usr/bin/env python3
"""`lockstep serve` with the official `openai` client, in a virtual environment of the test's own.

usage: openai_client_test.py LOCKSTEP SOURCE_DIR VENV [unittest options]

VENV is made when it is not there, and kept. Where the package cannot be installed, exit 77 says why.
"""
import json, sys
import own_venv

if __name__ == "__main__":
    own_venv.enter(sys.argv[3], "openai>=1.60", "openai")

import asyncio, time
import openai
from command_harness import DUMMY, LOCKSTEP, SOURCE, Commands, write_tokenizer
import unittest
from serve_harness import Server, expected_ids

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
            "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"
            "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}")
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city",
                                         "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def text_of(ids):
    """As the byte tokenizer of write_tokenizer decodes them: ids from 256 on are none."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


class Clients(Commands):
    KEY = "secret"

    def setUp(self):
        super().setUp()
        write_tokenizer(self.model)
        template = self.model / "template.jinja"
        template.write_text(TEMPLATE)
        self.options = ["--chat-template", template, "--served-model-name", "tiny", "--api-key", self.KEY]

    def serve(self, *args, **options):
        server = Server(LOCKSTEP, SOURCE, self.model, *self.options, *args, **options)
        server.key = self.KEY
        return server

    def client(self, server, kind=openai.OpenAI, **options):
        return kind(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=options.pop("api_key", self.KEY), max_retries=0,
                    timeout=30, **options)


class CompletionTest(Clients):
    def test_completions(self):
        with self.serve(ranks=2) as server:
            client = self.client(server)
            self.check_models(client, server)
            self.check_forms(client)
            self.check_logprobs(client)
            self.check_stream(client)
            self.check_sampling(client)

    def check_models(self, client, server):
        models = client.models.list().data
        self.assertEqual([m.id for m in models], ["tiny"])
        self.assertEqual(models[0].max_model_len, json.loads(server.get("/v1/models")[2])["data"][0]["max_model_len"])
        self.assertEqual(client.models.retrieve("tiny").owned_by, "lockstep")

    def check_forms(self, client):
        ids = [72, 105, 33]
        for prompt, prompts in ((ids, [ids]), ("Hi!", [[300, *ids]]), ([ids, [5]], [ids, [5]]), (["Hi!", "a"], [[300, *ids], [300, 97]])):
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
            self.assertEqual(answer.object, "text_completion")
            self.assertTrue(answer.id.startswith("cmpl-"))
            self.assertEqual([c.text for c in answer.choices], [text_of(expected_ids(p, 6)) for p in prompts])
            self.assertEqual([(c.index, c.finish_reason) for c in answer.choices], [(i, "length") for i in range(len(prompts))])
            self.assertEqual((answer.usage.prompt_tokens, answer.usage.completion_tokens),
                             (sum(map(len, prompts)), 6 * len(prompts)))
            self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
        several = client.completions.create(model="tiny", prompt="Hi!", max_tokens=4, n=3, echo=True, temperature=0)
        self.assertEqual([c.text for c in several.choices], ["Hi!" + text_of(expected_ids([300, *ids], 4))] * 3)
        self.assertTrue(several._request_id)

    def check_logprobs(self, client):
        answer = client.completions.create(model="tiny", prompt=[1, 2], max_tokens=5, logprobs=2, temperature=0)
        logprobs = answer.choices[0].logprobs
        self.assertEqual([len(x) for x in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)],
                         [5] * 4)
        for value in logprobs.token_logprobs:
            self.assertAlmostEqual(value, 0, places=3)
        scored = client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=0, logprobs=1, echo=True).choices[0].logprobs
        self.assertIsNone(scored.token_logprobs[0])
        self.assertEqual(len(scored.token_logprobs), 3)

    def check_stream(self, client):
        chunks = list(client.completions.create(model="tiny", prompt=[1, 2], max_tokens=30, temperature=0, stream=True, n=2,
                                                stream_options={"include_usage": True}))
        self.assertEqual(chunks[-1].choices, [])
        self.assertEqual((chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens), (2, 60))
        self.assertTrue(all(c.usage is None for c in chunks[:-1]))
        for index in (0, 1):
            own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
            self.assertEqual("".join(c.text for c in own), text_of(expected_ids([1, 2], 30)))
            self.assertEqual([c.finish_reason for c in own if c.finish_reason], ["length"])

    def check_sampling(self, client):
        create = lambda **fields: client.completions.create(model="tiny", prompt=[1, 2], max_tokens=3, **fields).choices[0]
        self.assertEqual(create(logit_bias={"65": 100}, temperature=0).text, "AAA")
        # Biases outweigh what the null model says by far, so that the draw is among these alone.
        wild = dict(logit_bias={str(i): 100 for i in range(65, 91)}, temperature=1.0)
        self.assertEqual(create(seed=5, **wild).text, create(seed=5, **wild).text)
        self.assertGreater(len({create(**wild).text for _ in range(8)}), 1)
        self.assertEqual(create(temperature=0, logit_bias={"65": 100}, stop=["AA"]).finish_reason, "stop")
        self.assertEqual(create(temperature=0, extra_body={"top_k": 1, "min_p": 0.1, "ignore_eos": True,
                                                           "repetition_penalty": 1.0}).finish_reason, "length")


class ChatTest(Clients):
    def test_chats(self):
        with self.serve() as server:
            client = self.client(server)
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
            prompt = list(b"<system>Be brief.<user>Hi<assistant>")
            expected = text_of(expected_ids(prompt, 8))
            answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, temperature=0)
            self.assertEqual((answer.object, answer.choices[0].message.role), ("chat.completion", "assistant"))
            self.assertEqual(answer.choices[0].message.content, expected)
            self.assertEqual((answer.usage.prompt_tokens, answer.usage.completion_tokens), (len(prompt), 8))
            self.check_stream(client, messages, expected)
            self.check_logprobs(client, messages)
            self.check_tools(client)
            self.check_async(server, messages, expected)

    def check_stream(self, client, messages, expected):
        with client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True,
                                            stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks[:-1]), expected)
        self.assertEqual([c.choices[0].finish_reason for c in chunks[:-1]][-1], "length")
        self.assertEqual(chunks[-1].usage.completion_tokens, 8)

    def check_logprobs(self, client, messages):
        for stream in (False, True):
            answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0, logprobs=True,
                                                    top_logprobs=3, stream=stream)
            parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
            content = [token for part in parts if part for token in part.content]
            self.assertEqual(len(content), 6)
            self.assertEqual([len(t.top_logprobs) for t in content], [3] * 6)
            self.assertEqual(content[0].top_logprobs[0].bytes, content[0].bytes)

    def check_tools(self, client):
        messages = [{"role": "user", "content": "Weather?"},
                    {"role": "assistant", "content": None, "tool_calls": [
                        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"}}]},
                    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
        answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=4, temperature=0)
        prompt = "<user>Weather?<assistant>weather{\"city\": \"Paris\"}<tool>sunny" + json.dumps([TOOL]) + "<assistant>"
        self.assertEqual(answer.usage.prompt_tokens, len(prompt))
        self.assertEqual(answer.choices[0].message.content, text_of(expected_ids(list(prompt.encode()), 4)))
        self.assertIsNone(answer.choices[0].message.tool_calls)

    def check_async(self, server, messages, expected):
        async def one(client):
            text = ""
            async for chunk in await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0,
                                                                    stream=True):
                text += chunk.choices[0].delta.content or ""
            return text

        async def all_of_them():
            async with self.client(server, openai.AsyncOpenAI) as client:
                return await asyncio.gather(*(one(client) for _ in range(40)))

        self.assertEqual(set(asyncio.run(all_of_them())), {expected})


class ErrorTest(Clients):
    def test_errors_have_the_clients_types(self):
        with self.serve() as server:
            client = self.client(server)
            create = client.completions.create
            with self.assertRaises(openai.AuthenticationError) as caught:
                self.client(server, api_key="wrong").models.list()
            self.assertEqual(caught.exception.code, "invalid_api_key")
            with self.assertRaises(openai.NotFoundError) as caught:
                create(model="gpt-4", prompt="a")
            self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))
            with self.assertRaises(openai.NotFoundError):
                client.embeddings.create(model="tiny", input="a")
            for fields, param in (({"temperature": -1}, "temperature"), ({"n": 0}, "n"), ({"suffix": "x"}, "suffix"),
                                  ({"max_tokens": -1}, "max_tokens"), ({"prompt": [1, 10**6]}, None),
                                  ({"prompt": [5] * 100000}, "prompt"), ({"stream_options": {"include_usage": True}}, "stream_options"),
                                  ({"stream": True, "top_p": 2}, "top_p")):
                with self.assertRaises(openai.BadRequestError, msg=fields) as caught:
                    create(**{"model": "tiny", "prompt": "a", **fields})
                self.assertEqual((caught.exception.param, caught.exception.type), (param, "invalid_request_error"), fields)
                self.assertTrue(caught.exception.request_id)
            with self.assertRaises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}],
                                               response_format={"type": "json_object"})
            self.assertIn("not supported", caught.exception.message)
            self.assertEqual(create(model="tiny", prompt=[1], max_tokens=2).usage.completion_tokens, 2)

    def test_a_stream_that_is_closed_frees_its_place_and_a_full_queue_says_so(self):
        # A step takes 5 ms: an answer of 100 tokens half a second.
        with self.serve("--max-num-seqs", 1, "--max-queue", 0, "--null-step-ms", 5) as server:
            client = self.client(server)
            stream = client.completions.create(model="tiny", prompt=[1], max_tokens=120, stream=True)
            next(iter(stream))
            with self.assertRaises(openai.RateLimitError) as caught:
                client.completions.create(model="tiny", prompt=[1], max_tokens=1)
            self.assertEqual(caught.exception.response.headers["retry-after"], "1")
            stream.close()
            server.wait_for(lambda: server.metric("lockstep:num_requests_running") == 0, seconds=1)
            self.assertEqual(client.completions.create(model="tiny", prompt=[1], max_tokens=1).usage.completion_tokens, 1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
