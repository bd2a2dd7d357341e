#!/usr/bin/env python3
"""The examples of launch/slurm on a real Slurm (slurm_box.py): one and several nodes, and every way in which Slurm ends a job early.

usage: slurm_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only

Skipped, with the reason, where Slurm is not installed or does not start. With LOCKSTEP_REQUIRE_SLURM in the environment that is a
failure. The null model answers: what it says of a prompt is known (expected_ids), whatever ranks, nodes and restarts there were.
"""
import collections, concurrent.futures, json, os, pathlib, re, shutil, signal, sys, tempfile, time, unittest, urllib.error, urllib.request

from serve_harness import expected_ids
from slurm_box import SlurmBox, Unavailable

LOCKSTEP = os.path.abspath(sys.argv[1])
SOURCE = pathlib.Path(sys.argv[2]).resolve()
TOKENS = 40
SLOW = ["--max-num-seqs", "2", "--null-step-ms", "5"]  # two lines in 0.2 s
# As tests/mpirun.sh has it; tcp because the two nodes are one host in truth, which shared memory between them would find out.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_btl": "self,tcp"}
box = None


def prompt_of(number):
    return [number % 320, 7, number // 320]


def make_model(folder):
    model = folder / "model"
    model.mkdir()
    shutil.copy(SOURCE / "tests/data/tiny-llama/config.json", model)
    return model


class Job:
    """A job of `count` lines. Submitting it again is running the same command again."""

    def __init__(self, folder, script, *options, count=12, sbatch=()):
        self.folder, self.count = folder, count
        self.input, self.output, self.log_file = folder / "in.jsonl", folder / "out.jsonl", folder / "log"
        self.input.write_text("".join(json.dumps({"custom_id": f"r{n}", "prompt": prompt_of(n), "max_tokens": TOKENS, "temperature": 0})
                                      + "\n" for n in range(1, count + 1)))
        model = make_model(folder)
        self.command = ["sbatch", "--parsable", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={self.log_file}", *sbatch,
                        SOURCE / "launch/slurm" / script, model, self.input, self.output, "--load-format", "null", "--tp", "2",
                        "--device", "cpu", "--progress", "none", *options]
        self.submit()

    def submit(self):
        env = {**MPI, "LOCKSTEP_DIR": str(SOURCE), "LOCKSTEP": LOCKSTEP, "CUDA_VISIBLE_DEVICES": ""}
        self.number = box.run(*self.command, env=env).strip()

    def log(self):
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def records(self):
        data = self.output.read_bytes() if self.output.exists() else b""
        return [json.loads(line) for line in data.split(b"\n")[:-1]]

    def state(self):
        return box.job(self.number)["JobState"]

    def wait_for(self, condition, what, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {seconds} s; {box.job(self.number)}\n{self.log()}"
            time.sleep(0.1)

    def wait_for_records(self, count):
        self.wait_for(lambda: len(self.records()) >= count, f"{count} records")

    def wait_for_end(self, seconds=60):
        """The state in which the job is over for good."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.state() in over, "the end", seconds)
        self.wait_for(lambda: not self.processes(), "the last process")
        return self.state()

    def restarts(self):
        return int(box.job(self.number)["Restarts"])

    def processes(self):
        return {pid: env for pid, env in box.processes().items() if env.get(b"SLURM_JOB_ID") == self.number.encode()}

    def rank(self, rank):
        """The process that srun started as this rank."""
        for pid, env in self.processes().items():
            if env.get(b"PMIX_RANK") == b"%d" % rank and os.readlink(f"/proc/{pid}/exe") == os.path.realpath(LOCKSTEP):
                return pid
        raise AssertionError(f"no rank {rank}: {self.log()}")


class ServerJob(Job):
    def __init__(self, folder, *options):
        self.log_file = folder / "log"
        self.command = ["sbatch", "--parsable", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={self.log_file}",
                        SOURCE / "launch/slurm/server.sbatch", make_model(folder), "--load-format", "null", "--tp", "2", "--device", "cpu",
                        "--port", "0", *options]
        self.submit()

    def wait_serving(self, times=1):
        self.wait_for(lambda: self.log().count(" serving ") == times, f"serving for the {times}. time")

    def health(self):
        port = re.search(r" serving \S+ on http://127.0.0.1:(\d+)", self.log())[1]
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).status
        except urllib.error.HTTPError as e:
            return e.code


class SlurmTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def job(self, *args, kind=Job, **options):
        job = kind(self.folder, *args, **options)
        self.addCleanup(box.run, "scancel", job.number, check=False)
        return job

    def assert_complete(self, job):
        """Each line is answered once, whole and as it should be."""
        records = {record["custom_id"]: record for record in job.records()}
        self.assertEqual(collections.Counter(r["custom_id"] for r in job.records()),
                         collections.Counter(f"r{n}" for n in range(1, job.count + 1)), job.log())
        for n in range(1, job.count + 1):
            text = records[f"r{n}"]["response"]["body"]["choices"][0]["text"]
            self.assertEqual([int(i) for i in text.split()], expected_ids(prompt_of(n), TOKENS), n)

    def assert_some(self, job):
        """It was stopped in the middle, between two lines."""
        self.assertTrue(0 < len(job.records()) < job.count, job.log())
        self.assertTrue(job.output.read_bytes().endswith(b"\n"))

    def continue_to_the_end(self, job):
        before = job.records()
        job.submit()
        self.assertEqual(job.wait_for_end(), "COMPLETED", job.log())
        self.assertEqual(job.records()[:len(before)], before)
        self.assert_complete(job)


class NodesTest(SlurmTest):
    """--tp 2, which Job gives, is refused where the ranks do not find each other."""

    def check(self, *args, nodes, **options):
        job = self.job(*args, **options)
        self.assertEqual(job.wait_for_end(), "COMPLETED", job.log())
        self.assertEqual(box.job(job.number)["NumNodes"], str(nodes))
        self.assertEqual(job.log().count("ok 12, failed 0"), 1, job.log())
        self.assert_complete(job)

    def test_srun_on_one_node(self):
        self.check("one_node.sbatch", nodes=1)

    def test_srun_on_two_nodes(self):
        self.check("several_nodes.sbatch", sbatch=["--ntasks-per-node=1"], nodes=2)

    def test_mpirun_on_one_node(self):
        self.check("mpirun.sbatch", nodes=1)

    def test_mpirun_on_two_nodes(self):
        self.check("mpirun.sbatch", sbatch=["--nodes=2", "--ntasks-per-node=1"], nodes=2)

    def test_a_refused_job_fails_with_its_status(self):
        job = self.job("one_node.sbatch", "--max-num-seqs", "0")
        self.assertEqual(job.wait_for_end(), "FAILED", job.log())
        self.assertEqual(box.job(job.number)["ExitCode"], "2:0", job.log())


class EarlyEndTest(SlurmTest):
    def each(self, check, *cases):
        """check(folder, case), all at the same time: they mostly wait."""
        def run(case):
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                check(pathlib.Path(folder), case)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(run, cases))

    def test_sigusr1_requeues(self):
        def check(folder, script):
            job = Job(folder, script, *SLOW, count=60, sbatch=["--nodes=2", "--ntasks-per-node=1"] if "several" in script else [])
            job.wait_for_records(4)
            box.run("scancel", "--batch", "--signal=USR1", job.number)
            job.wait_for(lambda: job.state() == "PENDING", "being requeued")
            self.assert_some(job)
            first = job.records()
            self.assertEqual(job.wait_for_end(), "COMPLETED", job.log())
            self.assertEqual(job.restarts(), 1)
            self.assertEqual(job.records()[:len(first)], first)
            self.assert_complete(job)
            for piece in ("no further lines are read", "requeuing job", "was requeued 1 times before", "are there already"):
                self.assertEqual(job.log().count(piece), 1, job.log())
        self.each(check, "one_node.sbatch", "several_nodes.sbatch", "mpirun.sbatch")

    def test_sigusr2_ends_the_job_and_running_it_again_goes_on(self):
        job = self.job("one_node.sbatch", *SLOW, count=40)
        job.wait_for_records(4)
        box.run("scancel", "--batch", "--signal=USR2", job.number)
        self.assertEqual(job.wait_for_end(), "FAILED", job.log())
        self.assertEqual((box.job(job.number)["ExitCode"], job.restarts()), ("1:0", 0))
        self.assert_some(job)
        self.continue_to_the_end(job)

    def test_scancel(self):
        def check(folder, script):
            job = Job(folder, script, "--max-num-seqs", "2", "--null-step-ms", "100", count=10)  # two lines in 4 s
            job.wait_for_records(2)
            box.run("scancel", job.number)
            self.assertEqual(job.wait_for_end(), "CANCELLED", job.log())
            self.assert_some(job)
            if script == "one_node.sbatch":  # mpirun kills the ranks after a second
                self.assertGreaterEqual(len(job.records()), 4, job.log())
                self.assertNotIn("ending at once", job.log())
                self.assertIn("stopped before the end of the input", job.log())
            self.continue_to_the_end(job)
        self.each(check, "one_node.sbatch", "mpirun.sbatch")

    def test_requeued_by_slurm(self):
        """As preemption does it."""
        def check(folder, script):
            job = Job(folder, script, *SLOW, count=40)
            job.wait_for_records(4)
            box.run("scontrol", "requeue", job.number)
            self.assertEqual(job.wait_for_end(), "COMPLETED", job.log())
            self.assertEqual(job.restarts(), 1)
            self.assert_complete(job)
        self.each(check, "one_node.sbatch", "mpirun.sbatch")

    def test_a_failed_node(self):
        """Slurm gives it up, and starts the job on the other one."""
        job = self.job("one_node.sbatch", *SLOW, count=40)
        job.wait_for_records(4)
        node = box.job(job.number)["NodeList"]
        self.addCleanup(box.run, "scontrol", "update", f"NodeName={node}", "State=RESUME")
        box.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        self.assertEqual(job.wait_for_end(), "COMPLETED", job.log())
        self.assertEqual(job.restarts(), 1)
        self.assertNotEqual(box.job(job.number)["NodeList"], node)
        self.assert_complete(job)

    def test_a_killed_rank(self):
        def check(folder, rank):
            job = Job(folder, "one_node.sbatch", *SLOW, count=40)
            job.wait_for_records(4)
            os.kill(job.rank(rank), signal.SIGKILL)
            start = time.monotonic()
            self.assertEqual(job.wait_for_end(), "FAILED", job.log())
            self.assertLess(time.monotonic() - start, 15)
            self.assertEqual(job.restarts(), 0)
            self.continue_to_the_end(job)
        self.each(check, 0, 1)


class ServerTest(SlurmTest):
    def test_ranks_that_die_are_started_again_and_sigusr2_drains(self):
        job = self.job(kind=ServerJob)
        job.wait_serving()
        for number, rank in ((1, 1), (2, 0)):
            os.kill(job.rank(rank), signal.SIGKILL)
            job.wait_for(lambda: f"restart {number} of 5" in job.log(), "a restart")
            self.assertEqual(job.health(), 503)
            job.wait_serving(number + 1)
            self.assertEqual(job.health(), 200)
        box.run("scancel", "--batch", "--signal=USR2", job.number)
        self.assertEqual(job.wait_for_end(), "COMPLETED", job.log())
        self.assertNotIn("restart 3", job.log())

    def test_scancel_restarts_nothing(self):
        job = self.job(kind=ServerJob)
        job.wait_serving()
        box.run("scancel", job.number)
        self.assertEqual(job.wait_for_end(), "CANCELLED", job.log())
        self.assertNotIn("restart", job.log())

    def test_a_refused_server_fails_with_its_status(self):
        job = self.job("--max-num-seqs", "0", kind=ServerJob)
        self.assertEqual(job.wait_for_end(), "FAILED", job.log())
        self.assertEqual(box.job(job.number)["ExitCode"], "2:0", job.log())
        self.assertNotIn("restart", job.log())


class TimeLimitTest(SlurmTest):
    def test_the_signal_before_the_time_limit(self):
        # Slurm looks every 30 s whether a signal is due within the next 30: 31 s before the limit of 60 at the earliest, and never
        # while the job still starts. There are 62 s of work.
        job = self.job("one_node.sbatch", "--max-num-seqs", "2", "--null-step-ms", "20", count=156,
                       sbatch=["--time=1", "--signal=B:USR1@1"])
        self.assertEqual(job.wait_for_end(240), "COMPLETED", job.log())
        self.assertGreaterEqual(job.restarts(), 1, job.log())
        self.assertEqual(job.log().count("requeuing job"), job.restarts(), job.log())
        self.assert_complete(job)


if __name__ == "__main__":
    try:
        with SlurmBox() as box:
            unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
    except Unavailable as reason:
        if os.environ.get("LOCKSTEP_REQUIRE_SLURM"):
            sys.exit(f"slurm_test.py: no Slurm: {reason}")
        print(f"skipped: {reason}")
        sys.exit(77)
