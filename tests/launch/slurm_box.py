"""A Slurm of its own on this machine: munged, slurmctld and two slurmd, all in one folder and on free ports of 127.0.0.1.

It knows nothing of a Slurm that the machine may belong to, and leaves nothing behind. Needs root and Debian's packages slurmctld,
slurmd, slurm-client and munge (bash launch/install_deps.sh --slurm).
"""
import contextlib, ctypes, os, pathlib, re, shutil, signal, socket, subprocess, tempfile, time

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
KILL_WAIT = 10  # seconds between Slurm's SIGTERM and its SIGKILL


class Unavailable(Exception):
    """Why there can be no Slurm here."""


def why_not():
    missing = [p for p in PROGRAMS if shutil.which(p, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (bash launch/install_deps.sh --slurm)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also when the test is killed


class SlurmBox:
    """Nodes n0 and n1 of 8 CPUs each, as Slurm believes. A context manager; __enter__ raises Unavailable."""

    def __enter__(self):
        if reason := why_not():
            raise Unavailable(reason)
        self.scratch = tempfile.TemporaryDirectory(prefix="slurm_box_")
        self.folder = pathlib.Path(self.scratch.name)
        self.folder.chmod(0o755)  # munged wants its socket to be within reach of all
        self.daemons = []
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith("SLURM")}, "PATH": PATH,
                    "SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        for name in ("munge", "state", "n0/tmp", "n1/tmp"):
            (self.folder / name).mkdir(parents=True)
        self.write_config()
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        self.daemon("munged", "--foreground", "--force", *(f"--{option}={munge / file}" for option, file in (
            ("socket", "socket"), ("key-file", "key"), ("log-file", "log"), ("pid-file", "pid"), ("seed-file", "seed"))))
        self.wait_until((munge / "socket").exists, 10, "munged")
        self.daemon("slurmctld", "-D")
        for node in ("n0", "n1"):
            self.daemon("slurmd", "-D", "-N", node)
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%t %D", check=False).split() == ["idle", "2"], 30, "Slurm")

    def write_config(self):
        controller, *nodes = free_ports(3)
        host = socket.gethostname().split(".")[0]
        f = self.folder
        (f / "slurm.conf").write_text(f"""
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
# A requeued job waits until its old credentials are certain to have expired: two minutes, unless told otherwise.
AuthInfo=socket={f}/munge/socket,cred_expire=5
StateSaveLocation={f}/state
SlurmdSpoolDir={f}/%n
# Of each node its own: PMIx keeps its socket there.
TmpFS={f}/%n/tmp
SlurmctldPidFile={f}/slurmctld.pid
SlurmdPidFile={f}/%n/pid
SlurmctldLogFile={f}/slurmctld.log
SlurmdLogFile={f}/%n/log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
# More CPUs than there are: several jobs at a time.
SlurmdParameters=config_overrides
KillWait={KILL_WAIT}
MailProg=/bin/true
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={nodes[0]} CPUs=8 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={nodes[1]} CPUs=8 State=UNKNOWN
PartitionName=box Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
""")

    def daemon(self, *command):
        with open(self.folder / "daemons.log", "ab") as log:
            self.daemons.append(subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                 preexec_fn=end_with_parent))

    def wait_until(self, condition, seconds, what):
        end = time.monotonic() + seconds
        while not condition():
            ended = [d for d in self.daemons if d.poll() is not None]
            if ended or time.monotonic() > end:
                why = f"{ended[0].args[0]} ended with {ended[0].returncode}" if ended else f"not ready within {seconds} s"
                raise Unavailable(f"{what}: {why}\n" + "".join(
                    log.read_text(errors="replace")[-2000:] for log in self.folder.rglob("*log") if log.is_file()))
            time.sleep(0.1)

    def run(self, *command, check=True, env=None):
        """What a command of Slurm's prints."""
        result = subprocess.run([str(c) for c in command], env={**self.env, **(env or {})}, cwd=self.folder, timeout=60,
                                stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert result.returncode == 0 or not check, f"{command}: {result.stderr}"
        return result.stdout

    def job(self, number):
        """What `scontrol show job` says: JobState, Restarts, NodeList, Reason, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "-o", number)))

    def processes(self):
        """Processes of jobs and of steps, by id: all that have this Slurm's configuration in their environment but the daemons."""
        mine, own = f"SLURM_CONF={self.env['SLURM_CONF']}".encode(), {d.pid for d in self.daemons}
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in own:
                with contextlib.suppress(OSError):
                    environ = (entry / "environ").read_bytes().split(b"\0")
                    if mine in environ:
                        found[int(entry.name)] = dict(e.split(b"=", 1) for e in environ if b"=" in e)
        return found

    def stop(self):
        """Ends jobs, then daemons; what is left of them is killed."""
        if all(d.poll() is None for d in self.daemons) and len(self.daemons) == 4:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--user=root", check=False)
                end = time.monotonic() + KILL_WAIT + 5
                while self.run("squeue", "-h", check=False) and time.monotonic() < end:
                    time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.scratch.cleanup()
