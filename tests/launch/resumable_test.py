#!/usr/bin/env python3
"""launch/slurm/resumable.sh without Slurm: which signals reach the command, what is requeued, which status comes out.

usage: resumable_test.py SOURCE_DIR [unittest options]        standard library only
"""
import os, pathlib, subprocess, sys, tempfile, unittest

SOURCE = pathlib.Path(sys.argv[1]).resolve()

# A command that has its parent signalled, waits for what is passed on, counts it, and ends with a status.
COMMAND = """
trap 'count=$((count + 1))' USR1
count=0
for signal in $SIGNALS; do kill -$signal $PPID; sleep 0.1; done
for _ in $(seq 15); do sleep 0.02; done
echo "passed on: $count"
[ "$STATUS" != killed ] || { trap - USR1; kill -USR1 $$; }
exit $STATUS
"""


class ResumableTest(unittest.TestCase):
    def run_job(self, signals, status, scontrol_status=0):
        with tempfile.TemporaryDirectory() as folder:
            scontrol = pathlib.Path(folder, "scontrol")
            scontrol.write_text(f'#!/bin/sh\necho "scontrol $*"\nexit {scontrol_status}\n')
            scontrol.chmod(0o755)
            env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SIGNALS": signals, "STATUS": str(status)}
            result = subprocess.run(["bash", SOURCE / "launch/slurm/resumable.sh", "bash", "-c", COMMAND], env=env, timeout=60,
                                    capture_output=True, text=True)
        requeued = "scontrol requeue 7\n" in result.stdout
        passed_on = int(result.stdout.split("passed on: ")[1].split()[0])
        return result.returncode, passed_on, requeued, result.stderr

    def check(self, signals, status, *expected, **options):
        result = self.run_job(signals, status, **options)
        self.assertEqual(result[:3], expected, (signals, status, result[3]))
        return result[3]

    def test_without_a_signal_the_status_is_the_command_s(self):
        for status in (0, 1, 2, 137):
            self.check("", status, status, 0, False)

    def test_the_signal_before_the_time_limit(self):
        self.check("USR1", 1, 1, 1, True)
        self.check("USR1", 0, 0, 1, False)  # it was through after all
        self.assertIn("exit status 2: the job is not requeued", self.check("USR1", 2, 2, 1, False))
        self.check("USR1", "killed", 138, 1, False)  # it was still loading

    def test_a_site_that_does_not_requeue(self):
        self.assertIn("submitted again", self.check("USR1", 1, 1, 1, True, scontrol_status=1))

    def test_the_others_do_not_requeue(self):
        self.check("USR2", 1, 1, 1, False)
        self.check("TERM", 1, 1, 0, False)  # Slurm tells the ranks itself, and decides

    def test_the_command_is_told_once(self):
        self.check("USR1 USR1", 1, 1, 1, True)
        self.check("USR2 USR1", 1, 1, 1, False)
        self.check("USR1 USR2", 1, 1, 1, False)
        self.check("USR1 TERM", 1, 1, 1, False)
        self.check("TERM USR1", 1, 1, 0, False)

    def test_no_command(self):
        result = subprocess.run(["bash", SOURCE / "launch/slurm/resumable.sh"], capture_output=True, text=True, timeout=60)
        self.assertEqual((result.returncode, result.stdout), (2, ""))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
