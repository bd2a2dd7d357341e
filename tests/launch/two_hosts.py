"""Two hosts on this machine, alpha and beta, joined by one cable: what mpirun and its ranks take for two machines of a network.

Each has a network, a host name, /dev/shm and System V shared memory of its own, so ranks reach each other by TCP over the cable alone.
Processes are seen from everywhere, and so are files. All lies in namespaces of this process, which take every process, mount
and device with them when it ends, however it ends. Needs iproute2, and root or user namespaces.
"""
import contextlib, ctypes, os, pathlib, shutil, signal, subprocess, sys, tempfile, time

SKIPPED = 77
INSIDE = "LOCKSTEP_TWO_HOSTS_FOLDER"
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class Unavailable(Exception):
    """Why there can be no two hosts here."""


def enter_namespaces():
    """Runs the calling script again where hosts can be made, and ends with its status, or with SKIPPED and the reason. Returns
    in the script that runs again. Its temporary files are in memory that goes with the namespaces."""
    if INSIDE in os.environ:
        tempfile.tempdir = os.environ[INSIDE]
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tempfile.tempdir], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # for jobs on this side
        return
    missing = [p for p in ("ip", "unshare", "nsenter", "hostname", "mpirun") if shutil.which(p, path=PATH) is None]
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net",
               *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    reason = f"not installed: {', '.join(missing)}" if missing else refusal_of([*unshare, "sh", "-c", TRIAL])
    if reason:
        print(f"skipped, no namespaces for two hosts: {reason}")
        sys.exit(SKIPPED)
    with tempfile.TemporaryDirectory(prefix="two_hosts_") as folder:
        run = subprocess.Popen([*unshare, sys.executable, *sys.argv], env={**os.environ, "PATH": PATH, INSIDE: folder},
                               preexec_fn=end_with_parent)
        sys.exit(run.wait())


TRIAL = """
set -e
mount -t tmpfs tmpfs /dev/shm
unshare --net --uts --mount --ipc hostname alpha
ip link add eth0 type veth peer name eth1
"""


def refusal_of(command):
    """What it says when it fails, None when it does not."""
    tried = subprocess.run(command, env={**os.environ, "PATH": PATH}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip() or f"{command[0]} ended with {tried.returncode}"


def end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also when the test is killed


class Host:
    def __init__(self, name, address):
        self.name, self.address = name, address
        # The namespaces live as long as a process in them.
        self.holder = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "--ipc", "sleep", "infinity"])
        self.inside = ["nsenter", f"--target={self.holder.pid}", "--net", "--uts", "--mount", "--ipc", "--"]

    def is_apart(self):
        links = [[os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "uts", "mnt", "ipc")]
                 for pid in ("self", self.holder.pid)]
        return all(mine != theirs for mine, theirs in zip(*links))

    def run(self, *command):
        """Runs a command on this host; what it prints."""
        return subprocess.run([*self.inside, *map(str, command)], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              text=True).stdout

    def set_up(self, names):
        self.run("hostname", self.name)
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.run("mount", "--bind", names, "/etc/hosts")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")


class TwoHosts:
    """alpha, where mpirun and rank 0 run, and beta. One at a time; after enter_namespaces()."""

    def __enter__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="hosts_"))
        self.alpha, self.beta = self.hosts = Host("alpha", "10.77.0.1"), Host("beta", "10.77.0.2")
        names = self.folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.hosts))
        self.write_remote_shell()
        end = time.monotonic() + 10
        while not all(host.is_apart() for host in self.hosts):
            assert time.monotonic() < end, "unshare has made no namespaces"
            time.sleep(0.01)
        self.alpha.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", self.beta.holder.pid)
        for host in self.hosts:
            host.set_up(names)
        return self

    def __exit__(self, *_):
        for pid in [*self.processes(), *(host.holder.pid for host in self.hosts)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for host in self.hosts:
            host.holder.wait()
        shutil.rmtree(self.folder)

    def write_remote_shell(self):
        """What mpirun calls in place of ssh: AGENT HOST COMMAND. As with ssh, the command does not get mpirun's environment."""
        self.agent = self.folder / "agent.sh"
        pids = "".join(f"{host.name}) pid={host.holder.pid} ;; " for host in self.hosts)
        self.agent.write_text(f"""#!/bin/sh
case $1 in {pids}*) echo "no host $1" >&2; exit 255 ;; esac
mkdir -p {self.folder}/$1
shift
exec env -i PATH={PATH} HOME=/ TMPDIR={self.folder} nsenter --target=$pid --net --uts --mount --ipc -- sh -c "$*"
""")
        self.agent.chmod(0o755)

    def start(self, command, env=None, **options):
        """A process on alpha from where mpirun reaches both hosts."""
        return subprocess.Popen([*self.alpha.inside, *map(str, command)], stdin=subprocess.DEVNULL, env={
            **os.environ, "OMPI_MCA_plm_rsh_agent": str(self.agent), "TMPDIR": str(self.folder), **(env or {})}, **options)

    def cut(self):
        """From here on nothing passes between the hosts, and neither is told."""
        self.beta.run("ip", "link", "set", "eth0", "down")

    def mend(self):
        self.beta.run("ip", "link", "set", "eth0", "up")

    def processes(self):
        """Of all that runs on the hosts, by id: the name of the host and the command."""
        names = {os.readlink(f"/proc/{host.holder.pid}/ns/uts"): host.name for host in self.hosts}
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (host.holder.pid for host in self.hosts):
                with contextlib.suppress(OSError):
                    host = names.get(os.readlink(entry / "ns/uts"))
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if host and command:  # a process that is over has none
                        found[int(entry.name)] = host, command
        return found
