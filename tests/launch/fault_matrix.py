#!/usr/bin/env python3
"""What happens to a job when a rank, or mpirun, meets a fault: every fault on rank 0 and on another rank, in every phase.

usage: fault_matrix.py LOCKSTEP SOURCE_DIR INJECTION [--cuda RANKS] [--some | CELL...]        standard library only

Prints a table, a line a cell: how long after the fault the job had ended, its exit status, what it said, what a client heard, and
what was left behind. Exit status 1 when a cell is not as guaranteed. --some: a choice of cells for every day; CELL is a name as in
the table's first column, or its beginning. INJECTION: the library built from fault_injection.cc.

The model is one without arithmetic on 3 ranks of the CPU or, with --cuda, one of 7 billion made-up weights on that many GPUs.
"""
import collections, json, os, pathlib, re, shutil, signal, socket, subprocess, sys, tempfile, threading, time, uuid
from serve_harness import Stream, Server, descendants, environ_of, is_running

LOCKSTEP, SOURCE, INJECTION = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve(), os.path.abspath(sys.argv[3])
CHOICE = sys.argv[4:]
CUDA = CHOICE[:1] == ["--cuda"]
RANKS = int(CHOICE[1]) if CUDA else 3
CHOICE = CHOICE[2:] if CUDA else CHOICE
OTHER = RANKS - 1
WATCHDOG, LIMIT = 3, 5  # LIMIT: seconds from the fault to the end, behind the watchdog's where it is the one to notice
THROW, EXIT_0, HANG = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2, signal.SIGRTMIN + 3
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP, "exit 0": EXIT_0, "exception": THROW,
          "hang": HANG}
PHASES = ("load", "prefill", "decode", "idle")
# What the line says of the phase, and of the cause. A launcher that is faster than the other ranks takes the cause with it.
SAYS_PHASE = {"load": "while loading", "prefill": r"in step \d+ \(prefill\)", "decode": r"in step \d+ \(decode\)",
              "idle": r"idle (after|before) step \d+"}
ENDED = r"its process \d+ (%s|has ended)"
SAYS_CAUSE = {"SIGKILL": ENDED % "was killed by SIGKILL", "SIGSEGV": ENDED % "was killed by SIGSEGV",
              "SIGSTOP": r"it has not answered for 3\.\d s; its process \d+ is stopped",
              "exit 0": ENDED % "ended with exit status 0", "exception": "std::bad_alloc|out of memory|" + ENDED % "was killed by SIGABRT",  # some functions let none pass
              "hang": r"no progress for [34]\.\d s; it has not (reached|left) collective \d+ of the \w+ \(.*\), "
                      r"(in which ranks? [\d, ]+ waits?|which ranks? [\d, ]+ (has|have) passed)"}
SOME = ("SIGKILL rank 0 decode", f"SIGKILL rank {OTHER} load", f"SIGSTOP rank {OTHER} prefill", f"exit 0 rank {OTHER} idle",
        f"exception rank {OTHER} decode", f"hang rank {OTHER} decode", "mpirun SIGKILL decode", f"batch SIGKILL rank {OTHER}")
DEVICE_ENV = {} if CUDA else {"CUDA_VISIBLE_DEVICES": ""}
Outcome = collections.namedtuple("Outcome", "seconds status lines client left faults")


def shm_files(pids):
    """What of /dev/shm the processes have mapped."""
    found = set()
    for pid in pids:
        try:
            found |= set(re.findall(r"/dev/shm/\S+", pathlib.Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            pass
    return found


class Job:
    """mpirun lockstep ..., whose processes are known by a word in their environment."""

    def __init__(self, folder, *args, pause=0):
        self.word = uuid.uuid4().hex
        self.mark = folder / "pause"
        self.stderr = open(folder / "stderr", "w+b")
        env = {**os.environ, **DEVICE_ENV, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
               "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "self,vader,tcp", "FAULT_WORD": self.word}
        ranks = ["env", "LD_PRELOAD=" + INJECTION, f"FAULT_PAUSE_MARK={self.mark}", f"FAULT_PAUSE_SECONDS={pause}", LOCKSTEP, *map(str, args)]
        self.started = time.monotonic()
        self.process = subprocess.Popen(["mpirun", "-q", "-np", str(RANKS), *ranks], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=self.stderr, env=env, start_new_session=True)
        self.wait_for(lambda: len(self.marks()) == RANKS, "all ranks load")
        self.ranks = {int(environ_of(pid)[b"OMPI_COMM_WORLD_RANK"]): pid for pid in self.marks()}
        self.shm = shm_files(self.ranks.values())

    def marks(self):
        return [int(path.suffix[1:]) for path in self.mark.parent.glob("pause.*")]

    def log(self):
        return os.pread(self.stderr.fileno(), 1 << 20, 0).decode(errors="replace")

    def wait_for(self, what, name, seconds=60):
        end = time.monotonic() + seconds
        while not (result := what()):
            assert self.process.poll() is None, f"ended before: {name}\n{self.log()}"
            assert time.monotonic() < end, f"not within {seconds} s: {name}\n{self.log()}"
            time.sleep(0.01)
        return result

    def living(self):
        """Processes of the job, wherever they belong by now."""
        word = self.word.encode()
        return [int(p.name) for p in pathlib.Path("/proc").iterdir()
                if p.name.isdigit() and environ_of(int(p.name)).get(b"FAULT_WORD") == word and is_running(int(p.name))]

    def end(self, start, limit):
        """(seconds from `start` until no process is left, exit status of mpirun or None)"""
        while time.monotonic() < start + limit + 5:
            if self.process.poll() is not None and not self.living():
                return time.monotonic() - start, self.process.returncode
            time.sleep(0.02)
        return float("inf"), self.process.poll()

    def close(self):
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for path in self.shm:
            if os.path.exists(path):
                os.unlink(path)
        self.stderr.close()


class Client:
    """A streamed request, and what it heard."""

    def __init__(self, port, prompt, max_tokens, model):
        self.events, self.failure = [], None
        server = type("At", (), {"port": port, "headers": lambda _: {"Content-Type": "application/json"}})()
        self.stream = Stream.__new__(Stream)
        self.thread = threading.Thread(target=self.run, args=(server, {"model": model, "prompt": prompt, "stream": True,
                                                                       "max_tokens": max_tokens, "ignore_eos": True}))
        self.thread.start()

    def run(self, server, body):
        try:
            self.stream.__init__(server, body)
            if self.stream.status != 200:
                self.failure = f"{self.stream.status}"
            self.events.extend(self.stream)
        except Exception as e:
            self.failure = type(e).__name__

    def heard(self):
        self.thread.join(10)
        if self.thread.is_alive():
            return "nothing"
        if any('"error"' in e for e in self.events):
            return "error event"
        return "answer" if "[DONE]" in self.events else self.failure or "broken connection"


def is_free(port):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the past are no listener
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def leftovers(job, port):
    left = [f"process {pid}" for pid in job.living()] + [path for path in job.shm if os.path.exists(path)]
    return left + ([f"port {port}"] if port and not is_free(port) else [])


def model_folder(folder):
    model = folder / "model"
    model.mkdir()
    config = json.loads((SOURCE / "tests/data/tiny-llama/config.json").read_text())
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps({**config, **(large if CUDA else {}), "max_position_embeddings": 40000}))
    return model


def model_options(step_ms):
    """A model whose decode steps take some milliseconds: `step_ms` where that can be chosen."""
    return ["--load-format", "dummy", "--device", "cuda"] if CUDA else ["--load-format", "null", "--null-step-ms", step_ms]


def serve_until(phase, folder):
    """(job, port, client) of a server in that phase."""
    step_ms, tokens = (100, 16) if phase == "prefill" else (20, 2048)
    job = Job(folder, "serve", model_folder(folder), "--port", 0, *model_options(step_ms),
              "--max-num-batched-tokens", tokens, "--watchdog-seconds", WATCHDOG, pause=2 if phase == "load" else 0)
    if phase == "load":
        return job, None, None
    try:
        port = int(job.wait_for(lambda: re.search(r"serving .* on http://\S+:(\d+)", job.log()), "it serves")[1])
        client, model = None, str(folder / "model")
        if phase == "prefill":
            # 370 steps of 100 ms, or on GPUs 2000 of some 4.
            client = Client(port, list(range(3, 300)) * (110 if CUDA else 20), 4, model)
            time.sleep(1.5)
        elif phase == "decode":
            client = Client(port, [3, 4], 30000 if CUDA else 10000, model)
            job.wait_for(lambda: len(client.events) > 5, "it answers")
            time.sleep(1.2)
        else:
            time.sleep(1.5)  # a heartbeat or more
        return job, port, client
    except BaseException:
        job.close()
        raise


def check(seconds, limit, status, lines, wanted, client, left, rank0_lives):
    faults = []
    if seconds > limit:
        faults.append(f"more than {limit} s")
    if status is not None and status % 256 == 0:
        faults.append("exit status")
    if lines if wanted is None else len(lines) != 1 or not all(re.search(w, lines[0]) for w in wanted):
        faults.append("message")
    if client in ("nothing", "answer") or (rank0_lives and client == "broken connection"):
        faults.append("client")
    if left:
        faults.append("left behind")
    return Outcome(seconds, status, lines, client, left, faults)


def run_rank_cell(fault, rank, phase, folder):
    job, port, client = serve_until(phase, folder)
    try:
        start = time.monotonic()
        os.kill(job.ranks[rank], FAULTS[fault])
        # An idle rank allocates nothing, nor does a decode step on a GPU.
        if fault == "exception" and (phase == "idle" or (CUDA and phase == "decode")):
            another = Client(port, list(range(3, 300)), 100, str(folder / "model"))
            client = client or another
        limit = LIMIT + (WATCHDOG if fault in ("SIGSTOP", "hang") else 0)
        seconds, status = job.end(start, limit)
        lines = [line for line in job.log().splitlines() if line.startswith("lockstep error:")]
        # A rank without memory for loading is a refusal; an idle one is asked for something.
        says = {"idle": "in step|idle", "load": "opening"}.get(phase) if fault == "exception" else None
        wanted = [rf"rank {rank} \(\S+\)", says or SAYS_PHASE[phase], SAYS_CAUSE[fault]]
        return check(seconds, limit, status, lines, wanted, client.heard() if client else "-", leftovers(job, port), rank != 0)
    finally:
        job.close()


def run_mpirun_cell(number, phase, folder):
    job, port, client = serve_until(phase, folder)
    try:
        start = time.monotonic()
        job.process.send_signal(getattr(signal, number))
        seconds, status = job.end(start, LIMIT)
        lines = [line for line in job.log().splitlines() if line.startswith("lockstep error:")]
        return check(seconds, LIMIT, status, lines, None, client.heard() if client else "-", leftovers(job, port),
                     number == "SIGTERM")
    finally:
        job.close()


def run_batch_cell(fault, rank, folder):
    """The same command goes on after the fault: every line is answered once."""
    model, count = model_folder(folder), 60
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"custom_id": f"line {i}", "url": "/v1/completions", "method": "POST",
                                          "body": {"prompt": [3, i + 4], "max_tokens": (20 + i) * (8 if CUDA else 1),
                                                   "ignore_eos": True}}) + "\n" for i in range(count)))
    args = ["batch", model, "--input", source, "--output", out, "--max-num-seqs", 8, "--watchdog-seconds", WATCHDOG]
    job = Job(folder, *args, *model_options(20))
    try:
        job.wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 10, "some lines are answered")
        start = time.monotonic()
        os.kill(job.ranks[rank], FAULTS[fault])
        limit = LIMIT + (WATCHDOG if fault in ("SIGSTOP", "hang") else 0)
        seconds, status = job.end(start, limit)
        lines = [line for line in job.log().splitlines() if line.startswith("lockstep error:")]
        outcome = check(seconds, limit, status, lines, [rf"rank {rank} \(\S+\)", r"in step \d+", SAYS_CAUSE[fault]],
                        "-", leftovers(job, None), rank != 0)
    finally:
        job.close()
    before = out.read_bytes().count(b"\n")
    env = {**os.environ, **DEVICE_ENV, "LOCKSTEP": LOCKSTEP}
    again = subprocess.run(["bash", str(SOURCE / "launch/run.sh"), "-n", "2", *map(str, args + model_options(0))], env=env, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60)
    answered = sorted(json.loads(line)["custom_id"] for line in out.read_text().splitlines())
    if again.returncode != 0 or answered != sorted(f"line {i}" for i in range(count)):
        outcome.faults.append("resumption")
    return outcome._replace(client=f"{before} lines, then {len(answered)} of {count}")


def cells():
    """Name to what runs it."""
    all_cells = {}
    for phase in PHASES:
        for rank in (0, OTHER):
            for fault in FAULTS:
                all_cells[f"{fault} rank {rank} {phase}"] = lambda folder, f=fault, r=rank, p=phase: run_rank_cell(f, r, p, folder)
        for number in ("SIGKILL", "SIGTERM"):
            all_cells[f"mpirun {number} {phase}"] = lambda folder, n=number, p=phase: run_mpirun_cell(n, p, folder)
    for rank in (0, OTHER):
        for fault in ("SIGKILL", "SIGSTOP", "exception"):
            all_cells[f"batch {fault} rank {rank}"] = lambda folder, f=fault, r=rank: run_batch_cell(f, r, folder)
    return all_cells


def main():
    wanted = list(SOME) if CHOICE == ["--some"] else CHOICE or [""]
    chosen = {name: run for name, run in cells().items() if any(name.startswith(w) for w in wanted)}
    assert chosen, f"no cell is called {wanted}"
    bad = 0
    print("| fault | s | status | what it said | client | left behind | |\n|---|---|---|---|---|---|---|", flush=True)
    for name, run in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(pathlib.Path(folder))
        bad += bool(outcome.faults)
        said = " / ".join(line.removeprefix("lockstep error: ").replace(socket.gethostname(), "HOST") for line in outcome.lines)
        print(f"| {name} | {outcome.seconds:.1f} | {outcome.status} | {said or '-'} | {outcome.client} | "
              f"{', '.join(outcome.left) or '-'} | {'OFF: ' + ', '.join(outcome.faults) if outcome.faults else 'ok'} |", flush=True)
    print(f"{len(chosen)} cells, {bad} of them not as guaranteed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
