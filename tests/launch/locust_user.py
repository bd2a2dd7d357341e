"""What load_generator_test.py makes locust do: chats and completions, streamed or whole, each answer looked at.

The environment variable LOCKSTEP_TOKENS is the number of tokens that every answer has.
"""
import json, os, random, time

from locust import HttpUser, task

TOKENS = int(os.environ["LOCKSTEP_TOKENS"])


class Client(HttpUser):
    def body(self, **fields):
        return {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, **fields}

    def prompt(self):
        return "x" * random.randrange(1, 200)

    @task(4)
    def stream(self):
        self.read("/v1/completions", prompt=self.prompt())

    @task(4)
    def chat_stream(self):
        self.read("/v1/chat/completions", messages=[{"role": "user", "content": self.prompt()}])

    @task(2)
    def whole(self):
        with self.client.post("/v1/completions", json=self.body(prompt=self.prompt()), catch_response=True) as response:
            if response.ok and response.json()["usage"]["completion_tokens"] != TOKENS:
                response.failure(f"an answer of another length: {response.text[-300:]}")

    @task(1)
    def models(self):
        self.client.get("/v1/models")

    def read(self, path, **prompt):
        body = self.body(stream=True, stream_options={"include_usage": True}, **prompt)
        start, first, events = time.perf_counter(), None, []
        with self.client.post(path, json=body, stream=True, catch_response=True, name=path + " (stream)") as response:
            for line in response.iter_lines():
                if line.startswith(b"data: "):
                    first = first or time.perf_counter()
                    events.append(line[6:])
            if not response.ok:
                return
            response.request_meta["response_time"] = (time.perf_counter() - start) * 1000  # locust's ends with the headers
            if events[-1:] != [b"[DONE]"] or json.loads(events[-2])["usage"]["completion_tokens"] != TOKENS:
                response.failure(f"a stream with another end: {events[-2:]}")
        self.environment.events.request.fire(request_type="POST", name=path + " (first event)", response_length=0, exception=None,
                                             response_time=(first - start) * 1000)
