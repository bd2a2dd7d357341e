#!/usr/bin/env python3
"""The page at / in a real browser (chromium, headless): it shows the engine, and a prompt can be tried, with a key.

usage: console_page_test.py LOCKSTEP SOURCE_DIR [--screenshots FOLDER]        standard library only; skipped without chromium
"""
import base64, json, os, pathlib, shutil, subprocess, sys, tempfile, time

from serve_harness import Server

SKIPPED = 77
# Words, so that answers read like text; ids above are put together from bytes that no answer needs.
WORDS = ["the", "of", "and", "rank", "block", "token", "step", "page", "weight", "plan", "engine", "waits", "reads", "sends",
         "writes", "sums", "a", "small", "large", "next", "last", "each", "one", "two", "many"]


class Browser:
    """A page, driven over Chrome's DevTools protocol: messages that end in NUL, on file descriptors 3 and 4."""

    def __init__(self, chromium, folder):
        to_read, self.to = os.pipe()
        self.back, to_write = os.pipe()
        command = (f"exec {chromium} --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
                   f"--user-data-dir={folder} --remote-debugging-pipe about:blank 3<&{to_read} 4>&{to_write} >/dev/null 2>&1")
        self.process = subprocess.Popen(["bash", "-c", command], pass_fds=(to_read, to_write))
        os.close(to_read), os.close(to_write)
        self.buffer, self.number, self.session, self.requests, self.faults = b"", 0, None, [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def receive(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.back, 1 << 20)
            assert piece, "the browser has ended"
            self.buffer += piece
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.faults.append(params["exceptionDetails"])
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(params["entry"])
        return message

    def open(self, url, width=1100, height=1000, dark=False):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(domain + ".enable")
        self.look(width, height, dark)
        self.call("Page.navigate", url=url)

    def look(self, width, height, dark=False):
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression, seconds=30):
        end = time.monotonic() + seconds
        while not (result := self.value(expression)):
            assert time.monotonic() < end, f"never true: {expression}; page: {self.value('document.body.innerText')}"
            time.sleep(0.1)
        return result

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


def write_model(folder, source):
    shutil.copy(source / "tests/data/tiny-llama/config.json", folder)
    words = [w + " " for w in WORDS] * 13
    vocabulary = {}
    for i, word in enumerate(words[:300]):
        vocabulary[word.replace(" ", "\u0120") if i < len(WORDS) else f"{word.strip()}{i}\u0120"] = i
    added = [{"id": 300, "content": "<s>", "special": True, "normalized": False, "lstrip": False, "rstrip": False,
              "single_word": False}]
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {**vocabulary, **{c: 310 + i for i, c in enumerate("hi")}}, "merges": []}}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def check_page(browser, server, shots):
    browser.open(f"http://127.0.0.1:{server.port}/")
    browser.wait_for("document.getElementById('state')?.textContent === 'ready'")
    streams = [server.stream([3 + i, 5], max_tokens=3000, model="page") for i in range(6)]
    for stream in streams:
        stream.next()
    browser.wait_for("Number(document.getElementById('running').textContent) === 6")
    browser.wait_for("parseFloat(document.getElementById('rate').textContent) > 50")
    browser.wait_for("document.querySelectorAll('#chart-rate path').length === 2")
    info = browser.value("document.getElementById('info').innerText").split()
    for name, value in (("ranks", "2"), ("dtype", "float32"), ("weights", "null")):
        assert value == info[info.index(name) + 1], info

    # Without the key: the refusal is shown.
    ask = "document.getElementById('prompt').value = 'hi'; document.getElementById('tokens').value = 60; " \
          "document.getElementById('form').requestSubmit()"
    browser.value(ask)
    browser.wait_for("document.getElementById('note').className === 'bad'")
    assert browser.value("document.getElementById('note').textContent").startswith("401"), "no refusal"
    browser.faults.clear()  # the console tells of the 401
    for kind in ("chat", "text"):
        browser.value(f"document.getElementById('key').value = 'secret'; document.getElementById('kind').value = '{kind}'")
        browser.value(ask)
        browser.wait_for("document.getElementById('answer').textContent.length > 3")  # while it streams
        browser.wait_for("document.getElementById('note').textContent.includes('60 generated')")
        assert "ended by length" in browser.value("document.getElementById('note').textContent")
        answer = browser.value("document.getElementById('answer').textContent")
        assert len(answer.split()) > 30, answer
    time.sleep(6)  # for the charts to have something to show
    if shots:
        browser.screenshot(shots / "page.png")
        browser.look(1100, 1000, dark=True)
        browser.screenshot(shots / "page_dark.png")
        browser.look(390, 900)
        time.sleep(1.5)
        browser.screenshot(shots / "page_narrow.png")
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than its window"
    # Stop in the middle.
    browser.value("document.getElementById('tokens').value = 4000; document.getElementById('form').requestSubmit()")
    browser.wait_for("document.getElementById('answer').textContent.length > 3")
    browser.value("document.getElementById('stop').click()")
    browser.wait_for("document.getElementById('note').textContent === 'stopped'")
    for stream in streams:
        stream.close()
    browser.wait_for("document.getElementById('running').textContent === '0'")
    outside = [u for u in browser.requests if not u.startswith((f"http://127.0.0.1:{server.port}/", "data:"))]
    assert not outside, f"asks elsewhere: {outside}"
    assert not browser.faults, browser.faults


def main():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("skipped: there is no chromium")
        return SKIPPED
    lockstep, source = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    shots = pathlib.Path(sys.argv[4]) if sys.argv[3:4] == ["--screenshots"] else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = pathlib.Path(folder, "model")
        model.mkdir()
        write_model(model, source)
        with Server(lockstep, source, model, "--served-model-name", "page", "--null-step-ms", 20, "--api-key", "secret",
                    "--num-gpu-blocks-override", 2000, ranks=2) as server:
            server.key = "secret"
            with Browser(chromium, pathlib.Path(folder, "profile")) as browser:
                check_page(browser, server, shots)
    print("the page shows the engine, and answers stream")
    return 0


sys.exit(main())
