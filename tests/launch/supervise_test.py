#!/usr/bin/env python3
"""`serve --restarts` and `lockstep supervise`: ranks that are killed, signals, refusals, and what clients see meanwhile.

usage: supervise_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only
"""
import collections, http.client, json, os, re, signal, socket, subprocess, tempfile, threading, time

from command_harness import LOCKSTEP, SOURCE, lockstep, main
from serve_harness import descendants, is_running
from serve_test import NULL, PROMPT, Servers


class HealthPoll:
    """Asks for /health on new connections, again and again, until the end of the with block."""

    def __init__(self, port):
        self.port, self.answers, self.done = port, [], False
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done = True
        self.thread.join()

    def run(self):
        while not self.done:
            self.answers.append((self.ask(), time.monotonic()))
            time.sleep(0.004)

    def ask(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException) as e:
            return type(e).__name__
        finally:
            connection.close()

    def counts(self):
        return collections.Counter(answer for answer, _ in self.answers)

    def longest_silence(self):
        """Seconds between two answers."""
        times = [when for answer, when in self.answers if answer in (200, 503)]
        return max(b - a for a, b in zip(times, times[1:]))


class Supervised(Servers):
    def wait_serving(self, server, times):
        server.wait_for(lambda: server.read_log().count(" serving ") == times)
        server.pids = descendants(server.process.pid)

    def supervise(self, *args, **options):
        """lockstep supervise as a process of its own, and the file of its messages."""
        log = tempfile.TemporaryFile()
        self.addCleanup(log.close)
        process = subprocess.Popen([LOCKSTEP, "supervise", *args], stdin=subprocess.DEVNULL, stderr=log, **options)
        self.addCleanup(process.kill)
        return process, lambda: os.pread(log.fileno(), 1 << 20, 0).decode()


class RestartTest(Supervised):
    def test_ranks_that_die_are_started_again(self):
        with self.serve("--restarts", 2, ranks=2) as server:
            supervisor = server.process.pid
            with HealthPoll(server.port) as poll:
                for number, rank in ((1, 0), (2, 1)):
                    before = server.pids
                    os.kill(server.rank(rank), signal.SIGKILL)
                    if rank == 0:
                        self.check_what_clients_get(server)
                    self.wait_serving(server, number + 1)
                    self.assertEqual([p for p in before if is_running(p)], [])
                    # 1: another rank has noticed it before mpirun.
                    self.assertRegex(server.read_log(), r"the job has failed \(exit status (137: a rank was ended by SIGKILL|1)\); "
                                                        f"restart {number} of 2 in {number} s")
                    self.assert_answers(server)
                    self.assertEqual(server.process.pid, supervisor)
            counts = poll.counts()
            print(f"/health meanwhile: {dict(counts)}, no answer for at most {poll.longest_silence():.3f} s")
            # A connection that a dying rank 0 has accepted breaks; none is refused.
            broken = sum(count for answer, count in counts.items() if answer not in (200, 503))
            self.assertLessEqual(broken, 2, counts)
            self.assertNotIn("ConnectionRefusedError", counts)
            self.assertGreater(counts[503], 50, counts)
            os.kill(server.rank(1), signal.SIGKILL)
            self.assertIn(server.wait_ended(), (1, 137), server.read_log())
            self.assertIn("no restart of 2 is left: ending", server.read_log())

    def check_what_clients_get(self, server):
        """While nobody serves: the error object, when to come back, and a connection that ends."""
        server.wait_for(lambda: server.get("/health")[0] == 503)
        status, headers, text = server.request("POST", "/v1/completions", {"model": "m", "prompt": PROMPT})
        self.assertEqual(status, 503, text)
        error = json.loads(text)["error"]
        self.assertEqual((error["type"], error["code"]), ("service_unavailable_error", "unavailable"))
        self.assertIn("it is started again", error["message"])
        self.assertGreaterEqual(int(headers["Retry-After"]), 5)
        self.assertEqual(headers["Connection"], "close")

    def test_commands_of_any_kind_and_refusals(self):
        """The rules, with commands that are no servers; all at once, since they mostly wait."""
        folder = self.folder
        def run(name, script, restarts=1):
            return self.supervise("--restarts", str(restarts), "--", "sh", "-c", f"echo >> {folder}/{name}; {script}")
        cases = {"ok": ("exit 0", 0, 1), "refused": ("exit 2", 2, 1), "failed": ("exit 3", 3, 2),
                 "killed": ("kill -9 $$", 137, 2),
                 "later_refused": (f"[ $(wc -l < {folder}/later_refused) = 1 ] && exit 1; exit 2", 2, 2),
                 "orphans": ("sleep 1000 & exit 4", 4, 1)}
        running = {name: run(name, script, 0 if name == "orphans" else 1) for name, (script, _, _) in cases.items()}
        self.check_refusals()
        for name, (_, status, runs) in cases.items():
            process, log = running[name]
            self.assertEqual(process.wait(timeout=20), status, (name, log()))
            self.assertEqual((folder / name).read_text().count("\n"), runs, name)
            self.assertEqual(log().count("restart 1 of 1 in 1 s"), runs - 1, log())
        self.assertEqual(running["ok"][1]() + running["refused"][1](), "")
        self.assertIn("sh was ended by SIGKILL", running["killed"][1]())
        self.assertIn("the restarted job was refused", running["later_refused"][1]())
        orphan = re.search(r"processes that do not end are killed: (\d+)\n", running["orphans"][1]())
        self.assertFalse(is_running(int(orphan[1])))

    def check_refusals(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            refused = lockstep("serve", self.model, *NULL, "--port", port, "--restarts", 3, ranks=2)
            self.assert_refused(refused, str(port), "in use")
        right = ("bash launch/run.sh -n RANKS serve MODEL ... --restarts 3", "lockstep supervise --restarts 3 -- mpirun")
        self.assert_refused(lockstep("serve", self.model, *NULL, "--restarts", 3), *right)
        mpirun = subprocess.run(["bash", str(SOURCE / "tests/mpirun.sh"), "2", LOCKSTEP, "serve", str(self.model), "--restarts", "3"],
                                stdin=subprocess.DEVNULL, capture_output=True, text=True)
        self.assertEqual(mpirun.returncode, 2, mpirun.stderr)
        for piece in right:
            self.assertEqual(mpirun.stderr.count(piece), 1, mpirun.stderr)
        self.assert_refused(lockstep("supervise", "--", "true", ranks=2), "supervise ... -- mpirun")
        self.assert_refused(lockstep("supervise", "--", "/nowhere/mpirun"), "/nowhere/mpirun", "No such file")
        self.assert_refused(lockstep("supervise", "--restarts", 1, "true"), "'true' in front of --")
        self.assert_refused(lockstep("supervise", "--restarts", 1), "nothing follows --")
        self.assert_refused(lockstep("serve", self.model, "--restarts=x", ranks=1), "--restarts x")


class StopTest(Supervised):
    def test_a_signal_drains_and_nothing_is_restarted(self):
        for number in (signal.SIGTERM, signal.SIGUSR2):
            with self.serve("--restarts", 2, "--null-step-ms", 5, ranks=2) as server:
                stream = server.stream(PROMPT, max_tokens=100)
                stream.next()
                server.process.send_signal(number)
                server.wait_for(lambda: server.get("/health")[0] == 503)
                self.assertEqual(list(stream)[-1], "[DONE]")
                stream.close()
                self.assertEqual(server.wait_ended(), 0, server.read_log())
                self.assertNotIn("restart", server.read_log())

    def test_a_second_signal_ends_at_once(self):
        with self.serve("--restarts", 2, "--null-step-ms", 10, ranks=2) as server:
            stream = server.stream(PROMPT, max_tokens=4000)
            stream.next()
            server.process.send_signal(signal.SIGINT)
            server.wait_for(lambda: server.get("/health")[0] == 503)
            time.sleep(0.3)
            start = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            self.assertEqual(server.wait_ended(), 0, server.read_log())
            self.assertLess(time.monotonic() - start, 3)
            self.assertIn("the server is shutting down", "".join(stream))
            stream.close()

    def test_a_signal_while_nobody_is_ready_ends_at_once(self):
        process, log = self.supervise("--restarts", "5", "--", "sh", "-c", "exit 3")
        while "restart 2 of 5 in 2 s" not in log():
            self.assertIsNone(process.poll(), log())
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=1), -signal.SIGTERM)
        self.edit_config(hidden_size=1536, intermediate_size=4096, num_hidden_layers=40, head_dim=256)
        with self.serve("--load-format", "dummy", "--num-gpu-blocks-override", 64, "--restarts", 3, ranks=2, null=False,
                        wait=False) as server:
            server.wait_for(lambda: "attention backend" in server.read_log())
            server.pids = descendants(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            self.assertEqual(server.wait_ended(), -signal.SIGTERM, server.read_log())
            self.assertIn("SIGTERM while no server is ready: ending", server.read_log())
            self.assertNotIn("restart 1", server.read_log())

    def test_a_killed_supervisor_leaves_nothing(self):
        with self.serve("--restarts", 2, ranks=2) as server:
            self.assertEqual(len(server.pids), 3)  # mpirun and two ranks
            server.process.kill()
            server.wait_ended()
            with self.assertRaises(ConnectionRefusedError):
                server.get("/health")


if __name__ == "__main__":
    main()
