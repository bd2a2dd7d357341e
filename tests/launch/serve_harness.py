"""A running `lockstep serve` under mpirun, and what is needed to talk to it: HTTP, server-sent events, Prometheus' text format.

By default it runs the model of tests/data/tiny-llama with --load-format null, whose answers expected_ids knows.
"""
import collections, http.client, json, os, pathlib, re, signal, subprocess, sys, tempfile, time

MASK = (1 << 64) - 1
Sample = collections.namedtuple("Sample", "name labels value")


def expected_ids(prompt, count, vocab_size=320, ends=(2,)):
    """What model/null_decoder.h says about the answer to these ids."""
    digest, answer = 0x9e3779b97f4a7c15, []
    for i in range(len(prompt) + count):
        if i >= len(prompt):
            token = digest % vocab_size
            while token in ends:
                token = (token + 1) % vocab_size
            answer.append(token)
        token = prompt[i] if i < len(prompt) else answer[-1]
        mixed = ((digest ^ token) * 0xbf58476d1ce4e5b9) & MASK
        digest = mixed ^ (mixed >> 32)
    return answer


def parse_metrics(text):
    """Samples of the exposition format; AssertionError where the text leaves it."""
    types, samples = {}, []
    assert text.endswith("\n")
    for line in text.splitlines():
        if m := re.fullmatch(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)", line):
            continue
        if m := re.fullmatch(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (counter|gauge|histogram)", line):
            assert m[1] not in types, f"{m[1]} is declared twice"
            types[m[1]] = m[2]
            continue
        m = re.fullmatch(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)', line)
        assert m, f"no sample: {line}"
        labels = {k: re.sub(r"\\(.)", lambda c: {"n": "\n"}.get(c[1], c[1]), v)
                  for k, v in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', m[2])}
        base = re.sub(r"_(bucket|sum|count)$", "", m[1])
        assert m[1] in types or types.get(base) == "histogram", f"{m[1]} has no type"
        samples.append(Sample(m[1], labels, float(m[3])))
    check_histograms(types, samples)
    return samples


def check_histograms(types, samples):
    for name in (n for n, t in types.items() if t == "histogram"):
        buckets = [s for s in samples if s.name == name + "_bucket"]
        limits, counts = [float(s.labels["le"]) for s in buckets], [s.value for s in buckets]
        assert limits == sorted(limits) and limits[-1] == float("inf"), name
        assert counts == sorted(counts), name
        assert counts[-1] == next(s.value for s in samples if s.name == name + "_count"), name


def metric(samples, name, **labels):
    """The one sample of that name with at least these labels."""
    found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) == 1, f"{len(found)} samples of {name} {labels}"
    return found[0]


def environ_of(pid):
    try:
        return dict(e.split(b"=", 1) for e in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in e)
    except OSError:
        return {}


def descendants(pid):
    """Of a process, itself left out."""
    try:
        children = [int(c) for task in pathlib.Path(f"/proc/{pid}/task").iterdir()
                    for c in (task / "children").read_text().split()]
    except OSError:
        return []
    return [d for child in children for d in [child, *descendants(child)]]


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Server:
    """run.sh -n RANKS serve MODEL; ranks None: the binary itself. Ended, whatever happened, at the end of a with block."""

    def __init__(self, lockstep, source, model, *args, ranks=1, null=True, env=None, wait=True):
        command = ["bash", str(pathlib.Path(source) / "launch/run.sh"), "-n", str(ranks)] if ranks else [str(lockstep)]
        command += ["serve", str(model), "--port", "0", *(["--load-format", "null"] if null else []), *map(str, args)]
        env = {**os.environ, "LOCKSTEP": str(lockstep), "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        self.ranks = ranks
        self.stderr = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.stderr, env=env,
                                        start_new_session=True)
        self.port, self.pids, self.key = None, [], None  # key: what requests carry
        try:
            if wait:
                self.wait_ready()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in {*self.pids, *descendants(self.process.pid)}:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.stderr.close()

    def read_log(self):
        return os.pread(self.stderr.fileno(), 1 << 20, 0).decode(errors="replace")

    def wait_for(self, what, seconds=60):
        """what(): true when it is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if result := what():
                return result
            assert self.process.poll() is None or what(), f"the server has ended: {self.read_log()}"
            time.sleep(0.01)
        raise AssertionError(f"not within {seconds} s: {self.read_log()}")

    def wait_ready(self):
        found = self.wait_for(lambda: re.search(r"serving .* on http://\S+:(\d+)", self.read_log()))
        self.port = int(found[1])
        self.pids = descendants(self.process.pid) or [self.process.pid]

    def rank(self, rank):
        """The process id of a rank."""
        if not self.ranks:
            return self.process.pid
        return next(p for p in self.pids if environ_of(p).get(b"OMPI_COMM_WORLD_RANK") == b"%d" % rank)

    def mpirun(self):
        return next(p for p in self.pids if pathlib.Path(f"/proc/{p}/comm").read_text().strip() in ("mpirun", "orterun"))

    def wait_ended(self, seconds=20):
        """The exit status; every process of the job is gone."""
        status = self.process.wait(timeout=seconds)
        end = time.monotonic() + 5
        while any(map(is_running, self.pids)) and time.monotonic() < end:
            time.sleep(0.02)
        assert not any(map(is_running, self.pids)), f"processes remain: {[p for p in self.pids if is_running(p)]}"
        return status

    def request(self, method, path, body=None, headers=None, timeout=30):
        """(status, headers, body as text)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = json.dumps(body) if isinstance(body, (dict, list)) else body
            connection.request(method, path, data, {**self.headers(), **(headers or {})})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read().decode()
        finally:
            connection.close()

    def headers(self):
        return {"Content-Type": "application/json", **({"Authorization": "Bearer " + self.key} if self.key else {})}

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def complete(self, prompt, **fields):
        """A completion as parsed JSON."""
        status, _, text = self.request("POST", "/v1/completions", {"model": self.model_name(), "prompt": prompt, **fields})
        assert status == 200, f"{status}: {text}"
        return json.loads(text)

    def model_name(self):
        return json.loads(self.get("/v1/models")[2])["data"][0]["id"]

    def metrics(self):
        status, headers, text = self.get("/metrics")
        assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4"), headers
        return parse_metrics(text)

    def metric(self, name, **labels):
        return metric(self.metrics(), name, **labels)

    def stream(self, prompt, **fields):
        return Stream(self, {"model": fields.pop("model", None) or self.model_name(), "prompt": prompt, "stream": True, **fields})


class Stream:
    """A streamed completion: iterate over what stands behind "data:"."""

    def __init__(self, server, body, path="/v1/completions"):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        self.connection.request("POST", path, json.dumps(body), server.headers())
        self.response = self.connection.getresponse()
        self.status = self.response.status

    def __iter__(self):
        for line in self.response:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()

    def next(self):
        return next(iter(self))

    def close(self):
        self.response.close()
        self.connection.close()


def main_arguments():
    """(LOCKSTEP, SOURCE_DIR) of the command line."""
    return os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
