#!/usr/bin/env python3
"""Ranks on two hosts (two_hosts.py): the answers of one host, refusals, and what becomes of a job when the cable is cut in the middle,
or a process at its other end is killed.

usage: two_hosts_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only

Skipped, with the reason, where this machine cannot make two hosts.
"""
import json, os, pathlib, shutil, signal, subprocess, time

import two_hosts

two_hosts.enter_namespaces()  # runs this script again; returns in there

from batch_test import Batches, prompt_of, read_records, text_of
from command_harness import DUMMY, GREEDY, LOCKSTEP, RUN, SOURCE, Commands, Result, lockstep, main

SHARED = pathlib.Path(os.environ.get("LOCKSTEP_SHARED") or SOURCE.parent / "shared")


class OnTwoHosts(Commands):
    def setUp(self):
        super().setUp()
        self.hosts = self.enterContext(two_hosts.TwoHosts())

    def start(self, on, *args, env=None, **options):
        """run.sh --host ON ARG..., from alpha."""
        return self.hosts.start(["bash", RUN, "--host", on, *args], env={"LOCKSTEP": LOCKSTEP, **(env or {})}, **options)

    def run_on(self, on, *args, **options):
        process = self.start(on, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        out, err = process.communicate(timeout=60)
        return Result(subprocess.CompletedProcess(process.args, process.returncode, out, err))


class AnswersTest(OnTwoHosts):
    def test_generate(self):
        arguments = [*DUMMY, "--ids", "1,2,3", "--ids", "7", "--ids", ",".join(map(str, range(40))), "--max-tokens", 12, *GREEDY]
        expected = [answer["token_ids"] for answer in self.generate(*arguments[len(DUMMY):]).json_lines()]
        self.assertEqual(list(map(len, expected)), [12, 12, 12])
        for on, network in (("alpha:2,beta:1", []), ("alpha:1,beta:1", ["--network", "10.77.0.0/24"])):
            result = self.run_on(on, *network, "generate", self.model, *arguments)
            self.assertEqual(result.status, 0, result.err)
            self.assertEqual([answer["token_ids"] for answer in result.json_lines()], expected)
            self.assertIn(f"on 2 hosts ({on.replace(':', ' ').replace(',', ', ')})", result.err)
            self.assertIn("go through MPI", result.err)
            if not network:
                self.add_bridges()

    def add_bridges(self):
        """Of containers, with the same addresses on each host: ranks that try these meet themselves."""
        for host in self.hosts.hosts:
            host.run("ip", "link", "add", "bridge0", "type", "veth", "peer", "name", "port0")
            host.run("ip", "address", "add", "172.17.0.1/16", "dev", "bridge0")
            for device in ("bridge0", "port0"):
                host.run("ip", "link", "set", device, "up")

    def test_reference_checkpoint(self):
        folder = SHARED / "golden/qwen2-14heads"
        if not folder.exists():
            self.skipTest(f"no {folder} (set LOCKSTEP_SHARED)")
        golden = json.loads((folder / "golden.json").read_text())
        prompts = [word for prompt in golden["prompts"] for word in ("--ids", ",".join(map(str, prompt)))]
        result = self.run_on("alpha:2,beta:1", "generate", folder, *prompts, "--dtype", "float32", "--ignore-eos", "--max-tokens",
                             len(golden["greedy"][0]), *GREEDY)
        self.assertEqual(result.status, 0, result.err)
        for answer, greedy, margins in zip(result.json_lines(), golden["greedy"], golden["margins"], strict=True):
            safe = next((i for i, margin in enumerate(margins) if margin < 1e-3), len(margins))
            self.assertGreater(safe, 0)
            self.assertEqual(answer["token_ids"][:safe], greedy[:safe])


class RefusedTest(OnTwoHosts):
    def generate_on(self, on, **options):
        return self.run_on(on, "generate", self.model, *DUMMY, "--ids", 1, "--max-tokens", 2, *GREEDY, **options)

    def test_another_program_or_option_on_one_host(self):
        other, wrapper = self.folder / "other", self.folder / "wrapper"
        shutil.copy(LOCKSTEP, other)
        with open(other, "ab") as file:
            file.write(b"x")
        for on_beta, piece in ((f'"{other}" "$@"', "the program is"), (f'"{LOCKSTEP}" "$@" --block-size 8', "--block-size is 8 here")):
            wrapper.write_text(f'#!/bin/sh\n[ "$(hostname)" = beta ] && exec {on_beta}\nexec "{LOCKSTEP}" "$@"\n')
            wrapper.chmod(0o755)
            result = self.generate_on("alpha:2,beta:1", env={"LOCKSTEP": str(wrapper)})
            self.assert_refused(result, "rank 2 (beta): ", piece)

    def test_a_model_that_one_host_lacks(self):
        self.hosts.beta.run("mount", "-t", "tmpfs", "tmpfs", self.model)
        self.assert_refused(self.generate_on("alpha:2,beta:1"), "rank 2 (beta): ", str(self.model), "config.json")


class FailureTest(OnTwoHosts):
    """A batch job is interrupted four times, each time in another way, and ends in time, says why, and leaves no process."""

    def setUp(self):
        super().setUp()
        self.output = self.folder / "out.jsonl"
        (self.folder / "in").write_text(text_of({"prompt": prompt_of(n), "max_tokens": 8 + n % 6, "temperature": 0}
                                                for n in range(1, 501)))
        self.arguments = ["batch", self.model, *DUMMY, "--max-num-seqs", 4, "--input", self.folder / "in", "--output"]

    def count(self):
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for(self, condition, seconds, what):
        end = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), end, f"{what} not within {seconds} s:\n{self.log()}{self.hosts.processes()}")
            time.sleep(0.02)

    def log(self):
        return (self.folder / "log").read_text(errors="replace")

    def interrupt(self, how, limit, *more, env=None):
        """how() in the middle; what the job has said."""
        enough = self.count() + 50
        with open(self.folder / "log", "wb") as log:
            job = self.start("alpha:2,beta:1", *self.arguments, self.output, *more, env=env, stdout=log, stderr=log)
        self.wait_for(lambda: self.count() > enough or job.poll() is not None, 30, "answers")
        self.assertIsNone(job.poll(), self.log())
        how()
        self.wait_for(lambda: job.poll() is not None, limit, "the job's end")
        self.assertNotIn(job.poll(), (0, 2), "it was done before")
        self.wait_for(lambda: not self.hosts.processes(), limit, "the end of all processes")
        return self.log()

    def kill(self, what):
        pid, = (p for p, (host, command) in self.hosts.processes().items() if host == "beta" and command.startswith(what))
        os.kill(pid, signal.SIGKILL)

    def test_interrupted_and_resumed(self):
        whole = self.folder / "whole.jsonl"
        uninterrupted = lockstep(*self.arguments, whole, ranks=3)
        self.assertEqual(uninterrupted.status, 0, uninterrupted.err)
        texts = lambda path: {r["id"]: r["response"]["body"]["choices"] for r in read_records(path)}

        # Nobody is told of a cut. mpirun and its daemon ask each other from time to time whether they are there.
        log = self.interrupt(self.hosts.cut, 8, "--watchdog-seconds", 60, env=keepalive(1, 1, 3))
        self.assertIn("ORTE has lost communication", log)
        self.assertIn("on node beta", log)
        self.hosts.mend()

        # So do the ranks. mpirun and the daemon, which would wait for each other, are then killed on both sides.
        log = self.interrupt(self.hosts.cut, 12, "--watchdog-seconds", 2, env=keepalive(300, 1, 3))
        self.assertRegex(log, r"lockstep error: rank 2 \(beta\) .*: it has not answered for [23]\.\d s")
        self.hosts.mend()

        self.assertIn("on node beta", self.interrupt(lambda: self.kill("orted"), 5))
        self.assertRegex(self.interrupt(lambda: self.kill(LOCKSTEP), 5), r"lockstep error: rank 2 \(beta\)")

        result = self.run_on("alpha:2,beta:1", *self.arguments, self.output)
        self.assertEqual(result.status, 0, result.err)
        self.assertEqual(self.count(), 500)  # none twice
        self.assertEqual(texts(self.output), texts(whole))  # sums in the order of ranks have the same bits


def keepalive(seconds, interval, probes):
    return {f"OMPI_MCA_oob_tcp_keepalive_{name}": str(value)
            for name, value in (("time", seconds), ("intvl", interval), ("probes", probes))}


if __name__ == "__main__":
    main()
