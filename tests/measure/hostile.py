"""Attacks of foreign code on the process that judges it and on the machine.

Each is the text of a program. It prints `done` and what it got if the attack worked; an exception
means that it was refused. `victim` has what it is told of its victim (see test_hostile_code.py).
"""

from __future__ import annotations

PROLOGUE = """
import ctypes, glob, json, mmap, os, resource, shutil, signal, socket, subprocess, sys, time
victim = json.loads(os.environ["VICTIM"])
judge, tree = victim["judge"], victim["tree"]
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *given):
    if getattr(libc, name)(*given) < 0:
        raise OSError(ctypes.get_errno(), name)
def done(what=""):
    print("done", what, flush=True)
"""

# Files of base, of the interpreter, of the caches.
FILES = {
    "writes a file of base": "open(f'{tree}/base.py', 'w').write('slow = 1'); done()",
    "puts a file in its place": """
path = f"{tree}/base.py.new"
open(path, "w").write("slow = 1")
os.rename(path, f"{tree}/base.py")
done()""",
    "adds a module to base": "open(f'{tree}/torch.py', 'w').write('slow = 1'); done()",
    "adds bytecode to base": "os.mkdir(f'{tree}/__pycache__'); done()",
    "removes a file of base": "os.unlink(f'{tree}/base.py'); done()",
    "changes modes in base": "os.chmod(f'{tree}/base.py', 0o600); done()",
    "makes base writable by a mount": """
call("mount", b"none", tree.encode(), b"", ctypes.c_ulong(32 | 4096), b"")
done()""",
    "unmounts what hides a file": "call('umount2', f'{tree}/.env'.encode(), 2); done()",
    "changes the interpreter": "open(os.path.realpath(sys.executable), 'ab').write(b''); done()",
    "changes the standard library": "open(json.__file__, 'a').write(''); done()",
    "adds a module to the installed packages": """
open(f"{victim['packages']}/flexq_bench_hostile.pth", "w").write("")
os.unlink(f"{victim['packages']}/flexq_bench_hostile.pth")
done()""",
    "changes the judge's compile cache": """
open(f"{victim['cache']}/cubin/entry.cubin", "r+b").write(b"bad")
done()""",
    "makes a device of the disk": """
os.mknod(os.environ["HOME"] + "/disk", 0o60600, os.makedev(254, 0))
open(os.environ["HOME"] + "/disk", "rb").read(1)
done()""",
    "renames the folder of base": "os.rename(tree, tree + '.old'); os.mkdir(tree); done()",
    "writes through a hard link to base": """
os.link(f"{tree}/base.py", os.environ["HOME"] + "/mine")
open(os.environ["HOME"] + "/mine", "w").write("slow = 1")
done()""",
    "opens a file of base again by its descriptor": """
file = os.open(f"{tree}/base.py", os.O_RDONLY)
open(f"/proc/self/fd/{file}", "w").write("slow = 1")
done()""",
    "opens a file by its handle": """
handle, mount = ctypes.create_string_buffer(bytes([128, 0, 0, 0]) + bytes(132)), ctypes.c_int()
call("name_to_handle_at", -100, tree.encode(), handle, ctypes.byref(mount), 0)
call("open_by_handle_at", os.open(tree, os.O_RDONLY), handle, os.O_RDONLY)
done()""",
    "mounts memory of its own": """
call("mount", b"none", os.environ["HOME"].encode(), b"tmpfs", ctypes.c_ulong(0), b"")
done()""",
    "makes others wait for a file of base": """
import fcntl  # who opens the file waits until its lease is given back
fcntl.fcntl(os.open(f"{tree}/base.py", os.O_RDONLY), 1024, fcntl.F_WRLCK)
done()""",
    "changes a setting of the kernel": """
text = open("/proc/sys/kernel/core_pattern").read()
open("/proc/sys/kernel/core_pattern", "w").write(text)
done()""",
}
# Secrets.
SECRETS = {
    "reads the judge's environment": "done(open(f'/proc/{judge}/environ').read())",
    "reads every environment": """
for path in glob.glob("/proc/[0-9]*/environ"):
    if "TOKEN=the secret" in open(path).read():
        done("the secret")""",
    "reads the judge's memory": """
open(f"/proc/{judge}/mem", "rb")
done()""",
    "reads the judge's memory by a system call": """
class Part(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
text = ctypes.create_string_buffer(8)
here, there = Part(ctypes.addressof(text), 8), Part(victim["address"], 8)
call("process_vm_readv", judge, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
done()""",
    "traces the judge": "call('ptrace', 0x4206, judge, None, None); done()",
    "opens the database by the judge's descriptor": """
for path in glob.glob(f"/proc/{judge}/fd/*"):
    if os.path.realpath(path) == victim["database"]:
        done(open(path, "rb").read(6))""",
    "opens the database": "done(open(victim['database'], 'rb').read(6))",
    "opens the database by the judge's root": """
done(open(f"/proc/{judge}/root{victim['database']}", "rb").read(6))""",
    "reads a file of the home": "done(open(victim['home'] + '/.ssh/id_rsa').read())",
    "reads a hidden file beside base": "done(open(f'{tree}/.env').read().strip() or 1 / 0)",
    "reads the files of the other side": "done(os.listdir(victim['exchange'])[0])",
    "lists the judge's command line": "done(open(f'/proc/{judge}/cmdline').read())",
    "takes a descriptor of the judge": """
for number in range(3, 64):
    pid = libc.syscall(434, judge, 0)
    if pid < 0:
        raise ProcessLookupError
    if libc.syscall(438, pid, number, 0) >= 0:
        done()""",
    "watches the files of the machine": "call('fanotify_init', 0, 0); done()",
    "watches the files of the other side": """
call("inotify_add_watch", libc.inotify_init1(0), victim["exchange"].encode(), 0xFFF)
done()""",
    "compares its descriptors with the judge's": """
call("syscall", 312, os.getpid(), judge, 0, 0, 0)
done()""",
    "asks the kernel's keyrings": "call('syscall', 250, 0, -4, 1); done()",
}
# Sockets.
SOCKETS = {
    "connects to a service's socket": """
socket.socket(socket.AF_UNIX).connect(victim["socket"])
done()""",
    "connects to an abstract socket": """
socket.socket(socket.AF_UNIX).connect("\\0" + victim["abstract"])
done()""",
    "connects to a port of this machine": """
socket.create_connection(("127.0.0.1", victim["port"]), 2)
done()""",
    "connects to another machine": """
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 53))
done()""",
    "reads packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); done()",
    "connects to the host of a virtual machine": """
socket.socket(40, socket.SOCK_STREAM)
done()""",
    "uses the kernel's cryptography": """
socket.socket(38, socket.SOCK_SEQPACKET)
done()""",
    "loads a module of the kernel for a kind of socket": """
for family in range(17, 64):
    try:
        socket.socket(family, socket.SOCK_RAW)
    except PermissionError:
        continue
    except OSError:
        pass
    done(family)""",
    "lets a ring of the kernel open a socket": """
call("syscall", 425, 8, ctypes.create_string_buffer(120))  # no filter sees what it asks for
done()""",
}
_CLONE = """
child = libc.syscall(56, {} | signal.SIGCHLD, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
if child < 0:
    raise PermissionError
done()"""
# Processes that stay; signals; limits; priorities; clocks.
PROCESSES = {
    "leaves a process in another session": """
if os.fork() == 0:
    os.setsid()
    os.execve(victim["sleep"], ["sleep", victim["mark"]], {})
time.sleep(0.2)""",
    "leaves an orphan with an empty environment": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(victim["sleep"], ["sleep", victim["mark"]], {})
    os._exit(0)
os.wait()
time.sleep(0.2)""",
    "leaves one that ignores signals": """
if os.fork() == 0:
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    os.setsid()
    os.execve(victim["sleep"], ["sleep", victim["mark"]], {})
time.sleep(0.2)""",
    "starts processes without end": """
count = 0
while count < 400:  # the limit of this test is below
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    count += 1
done()""",
    "starts threads without end": """
import threading
for _ in range(400):
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
done()""",
    "signals the judge": "os.kill(judge, signal.SIGCONT); done()",
    "signals everything": """
try:
    os.kill(-1, signal.SIGCONT)
finally:
    os.kill(judge, 0)
    done()""",
    "stops what started it": """
if os.getppid() == 0:
    raise ProcessLookupError
os.kill(os.getppid(), signal.SIGCONT)
done()""",
    "changes the judge's priority": """
os.setpriority(os.PRIO_PROCESS, judge, os.getpriority(os.PRIO_PROCESS, judge))
done()""",
    "changes the judge's CPUs": "os.sched_setaffinity(judge, os.sched_getaffinity(judge)); done()",
    "changes the judge's limits": "resource.prlimit(judge, resource.RLIMIT_CORE, (0, 0)); done()",
    "takes a real-time priority": """
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
done()""",
    "raises its own limit": """
most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
resource.setrlimit(resource.RLIMIT_NPROC, (most + 1, most + 1))
done()""",
    "sets the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time()); done()",
    "slows the clock": """
call("adjtimex", ctypes.create_string_buffer(bytes([0, 1]) + bytes(254)))
done()""",
    "makes a clock of its own": "call('unshare', 0x80); done()",
    "renames the machine": "socket.sethostname(socket.gethostname()); done()",
    "leaves its control group": """
for path in glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True):
    open(path, "w").write(str(os.getpid()))
    done()""",
    "becomes root again": """
os.setuid(0)
open("/etc/shadow").read()
done()""",
    "makes a user namespace": "call('unshare', 0x10000000); done()",
    "makes one by clone": _CLONE.format("0x10000000"),
    "makes a namespace of mounts by clone": _CLONE.format("0x20000"),
    "becomes root by a program of root's": """
shutil.copy("/bin/sh", os.environ["HOME"] + "/sh")
os.chmod(os.environ["HOME"] + "/sh", 0o4755)
for program in (glob.glob("/usr/bin/mount") + glob.glob("/bin/su"))[:1]:
    child = subprocess.Popen([program, "--help"], stdout=subprocess.DEVNULL, preexec_fn=lambda:
        call("ptrace", 0, 0, 0, 0))
    ids = open(f"/proc/{child.pid}/status").read().split("Uid:")[1].split()[:4]
    child.kill()
    if "0" in ids:
        done()""",
    "becomes root by a file without a name": """
file = os.memfd_create("program")
os.write(file, open("/usr/bin/id", "rb").read())
os.fchmod(file, 0o6755)
said = subprocess.run([f"/proc/self/fd/{file}", "-u"], pass_fds=[file], capture_output=True).stdout
if said == b"0\n":
    done()""",
    "takes the disk's time before others": """
call("syscall", 251, 1, 0, 1 << 13)
done()""",
    "moves the judge's memory": """
call("syscall", 256, judge, 8, ctypes.create_string_buffer(8), ctypes.create_string_buffer(8))
done()""",
    "enters the judge's namespaces": """
call("setns", os.open(f"/proc/{judge}/ns/mnt", os.O_RDONLY), 0)
done()""",
    "watches the processor's counters": """
event = ctypes.create_string_buffer(bytes([0, 0, 0, 0, 112]) + bytes(107))
call("syscall", 298, event, 0, -1, -1, 0)
done()""",
    "loads a program into the kernel": """
call("syscall", 321, 5, ctypes.create_string_buffer(128), 128)
done()""",
    "types into the terminal": """
import fcntl, termios
fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), termios.TIOCSTI, b"x")
done()""",
}
# Interfaces of the kernel, and files that other programs read of themselves.
INTERFACES = {
    "writes to base through its own memory": """
file = os.open(f"{tree}/base.py", os.O_RDONLY)
kept = mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ)
start = next(line for line in open("/proc/self/maps") if "base.py" in line).partition("-")[0]
with open("/proc/self/mem", "r+b", 0) as memory:
    memory.seek(int(start, 16))
    memory.write(b"slow = 1")
done()""",
    "writes into cached pages of base through a pipe": """
reader, writer = os.pipe()
os.write(writer, bytes(65536)); os.read(reader, 65536)  # each of its pages may be merged into
os.splice(os.open(f"{tree}/base.py", os.O_RDONLY), writer, 1, offset_src=0)
os.write(writer, b"low = 1 ")
if "slow = 1" not in open(f"{tree}/base.py").read():
    raise PermissionError
done()""",
    "maps a file of base for writing": """
mmap.mmap(os.open(f"{tree}/base.py", os.O_RDWR), 0)[:8] = b"slow = 1"
done()""",
    "punches a hole into a file of base": """
call("fallocate", os.open(f"{tree}/base.py", os.O_RDWR), 3, ctypes.c_long(0), ctypes.c_long(4))
done()""",
    "sets an attribute of base": "os.setxattr(f'{tree}/base.py', 'user.a', b'1'); done()",
    "sets a time of base": "os.utime(f'{tree}/base.py', (0, 0)); done()",
    "exchanges a file of base": """
open(os.environ["HOME"] + "/mine", "w").write("slow = 1")
call("renameat2", -100, (os.environ["HOME"] + "/mine").encode(), -100,
     f"{tree}/base.py".encode(), 2)
done()""",
    "clones its own file over one of base": """
import fcntl
open(os.environ["HOME"] + "/mine", "w").write("slow = 1")
fcntl.ioctl(os.open(f"{tree}/base.py", os.O_WRONLY), 0x40049409,
            os.open(os.environ["HOME"] + "/mine", os.O_RDONLY))
done()""",
    "makes base immutable": """
import fcntl
fcntl.ioctl(os.open(f"{tree}/base.py", os.O_RDONLY), 0x40086602, (16).to_bytes(8, "little"))
done()""",
    "leaves a hook in base's repository": """
os.makedirs(f"{tree}/.git/hooks", exist_ok=True)
open(f"{tree}/.git/hooks/post-checkout", "w").write("slow")""",
    "changes base's git configuration": """
os.makedirs(f"{tree}/.git", exist_ok=True)
open(f"{tree}/.git/config", "a").write("[core]\\n\\tfsmonitor = ./mine\\n")""",
    "adds a module that every interpreter imports": """
path = f"{victim['packages']}/sitecustomize.py"
open(path, "x").close()
os.unlink(path)
done()""",
    "preloads a library into every program": """
open("/etc/ld.so.preload", "a").close()
done()""",
    "changes git for every user": "open('/etc/gitconfig', 'a').close(); done()",
    "reads the kernel's log": """
if libc.klogctl(3, ctypes.create_string_buffer(4096), 4096) < 0:
    raise PermissionError
done()""",
    "reads the kernel's memory": "open('/proc/kcore', 'rb').read(4); done()",
    "handles page faults of others": """
call("syscall", 323, 0)
done()""",
    "asks for page faults by a device": "open('/dev/userfaultfd', 'rb'); done()",
    "starts a file system of its own": "open('/dev/fuse', 'r+b'); done()",
    "starts a virtual machine": "open('/dev/kvm', 'r+b'); done()",
    "makes a network interface": "open('/dev/net/tun', 'r+b'); done()",
    "opens a mount as a file": """
call("syscall", 428, -100, b"/", 1)
done()""",
    "makes a file system by the newer calls": """
call("syscall", 430, b"tmpfs", 0)
done()""",
    "changes its root": "os.chroot(tree); done()",
    "counts events of the judge": """
event = ctypes.create_string_buffer(bytes([1, 0, 0, 0, 112]) + bytes(107))
call("syscall", 298, event, judge, -1, -1, 0)
done()""",
    "takes the pages of the judge's memory": """
pid = libc.syscall(434, judge, 0)
if pid < 0:
    raise ProcessLookupError
call("syscall", 440, pid, ctypes.create_string_buffer(16), 1, 20, 0)
done()""",
    "stops the judge by the handle of its process": """
pid = libc.syscall(434, judge, 0)
if pid < 0:
    raise ProcessLookupError
call("syscall", 424, pid, signal.SIGCONT, None, 0)
done()""",
    "sends the judge a signal by a file": """
import fcntl
reader, writer = os.pipe()
fcntl.fcntl(reader, fcntl.F_SETOWN, judge)
fcntl.fcntl(reader, 10, 18)  # F_SETSIG, SIGCONT
done()""",
    "reads a name in the machine's shared memory": "done(open(victim['shared'], 'rb').read())",
    "replaces a name in the machine's shared memory": """
open(victim["shared"], "wb").write(b"mine")""",
    "locks the judge's cache": """
import fcntl
fcntl.flock(os.open(f"{victim['cache']}/cubin/entry.cubin", os.O_RDONLY), fcntl.LOCK_EX)
done()""",
    "starts the machine's handler of crashes": """
if resource.getrlimit(resource.RLIMIT_CORE) == (1, 1):  # no pipe, and less than any dump
    raise PermissionError
done()""",
    "takes memory that is no process's": """
call("syscall", 447, 0)
done()""",
    "writes messages into the kernel's log": "open('/dev/kmsg', 'w').write('mine'); done()",
    "asks the bus of the system": """
socket.socket(socket.AF_UNIX).connect("/run/dbus/system_bus_socket")
done()""",
    "asks Docker for a container": """
socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock")
done()""",
    "schedules a job for later": """
places = ["/var/spool/cron/crontabs/root", "/etc/cron.d/mine", "/var/spool/cron/atjobs/mine"]
for path in places:
    try:
        open(path, "a").close()
        done()
    except OSError:
        pass""",
    "listens to events of the kernel": """
socket.socket(16, socket.SOCK_DGRAM, 9)  # of netlink: audit
found = socket.socket(16, socket.SOCK_DGRAM, 15)
found.bind((0, 1))
if os.path.exists("/sys/kernel/uevent_helper") and os.access("/sys/kernel/uevent_helper", os.W_OK):
    done()""",
    "suspends the machine": "open('/sys/power/state', 'w').write(''); done()",
    "changes a CPU's frequency": """
for path in glob.glob("/sys/devices/system/cpu/cpu*/cpufreq/scaling_max_freq"):
    open(path, "r+")
    done()""",
    "takes a CPU away": """
open("/sys/devices/system/cpu/cpu1/online", "w")
done()""",
    "changes settings of a GPU": """
nvml = ctypes.CDLL("libnvidia-ml.so.1")
device, most = ctypes.c_void_p(), ctypes.c_uint()
if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
    raise PermissionError
nvml.nvmlDeviceGetPowerManagementLimit(device, ctypes.byref(most))
if nvml.nvmlDeviceSetPowerManagementLimit(device, most):  # to what it is
    raise PermissionError
done()""",
    "opens devices that manage GPUs": """
for path in glob.glob("/dev/nvidia*") + glob.glob("/dev/nvidia-caps/*"):
    if any(name in path for name in ("switch", "modeset", "tools")) or path.endswith("-cap1"):
        os.open(path, os.O_RDWR)
        done(path)""",
}
# Disk and memory. The limits of the test are 64 MB of files and 256 MB of memory.
RESOURCES = {
    "fills the temporary folder": """
for number in range(200):
    with open(f"{os.environ['TMPDIR']}/{number}", "wb") as file:
        file.write(bytes(1 << 20))
done()""",
    "fills the machine's temporary folder": """
for number in range(200):
    with open(f"/tmp/{number}", "wb") as file:
        file.write(bytes(1 << 20))
done()""",
    "fills shared memory": """
for number in range(200):
    with open(f"/dev/shm/{number}", "wb") as file:
        file.write(bytes(1 << 20))
done()""",
    "writes one large file": """
with open(victim["output"], "r+b") as file:
    file.truncate(1 << 30)
done()""",
    "maps shared memory": """
shared = mmap.mmap(-1, 600 << 20)
for start in range(0, 600 << 20, 4096):
    shared[start] = 1
time.sleep(5)
done()""",
    "takes memory": """
kept = bytearray(600 << 20)
for start in range(0, len(kept), 4096):
    kept[start] = 1
time.sleep(5)
done()""",
    "takes memory in a file without a name": """
file = os.memfd_create("kept")
for _ in range(600):
    os.write(file, bytes(1 << 20))
time.sleep(5)
done()""",
    "takes memory in its children": """
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(150 << 20)
        for start in range(0, len(kept), 4096):
            kept[start] = 1
        time.sleep(5)
        os._exit(0)
time.sleep(5)
done()""",
    "keeps memory of System V": "call('shmget', 0, 600 << 20, 0o1600); done()",
    "keeps messages of System V": "call('msgget', 0, 0o1600); done()",
    "makes files without end": """
for number in range(20_000):
    open(f"{os.environ['TMPDIR']}/{number}", "wb").close()
done()""",
    "keeps messages of POSIX": """
call("syscall", 240, b"kept", os.O_CREAT | os.O_RDWR, 0o600, None)
done()""",
}
# In a process each, one after the other; each says its name if it worked.
GROUP = """
for name, code in json.loads({codes!r}).items():
    if os.fork() == 0:
        signal.alarm(20)
        def done(what="", name=name):
            print("done", name, what, flush=True)
        try:
            exec(code, {{**globals(), "done": done}})
        except BaseException:
            pass
        os._exit(0)
    os.wait()
print("all tried", flush=True)
"""
GROUPS = {"files": FILES, "secrets": SECRETS, "sockets": SOCKETS, "interfaces": INTERFACES}
ATTACKS = {**FILES, **SECRETS, **SOCKETS, **PROCESSES, **INTERFACES, **RESOURCES}
# They work without a sandbox, and harm nothing here.
HARMLESS = (
    *("writes a file of base", "puts a file in its place", "adds a module to base"),
    *("renames the folder of base", "writes through a hard link to base"),
    *(
        "adds bytecode to base",
        "opens a file of base again by its descriptor",
        "removes a file of base",
    ),
    "changes modes in base",
    *("changes the judge's compile cache", "opens the database", "reads a file of the home"),
    *("opens the database by the judge's descriptor", "reads a hidden file beside base"),
    *("reads the files of the other side", "connects to a service's socket"),
    *("connects to an abstract socket", "connects to a port of this machine"),
    *("leaves a process in another session", "leaves an orphan with an empty environment"),
    *("leaves one that ignores signals", "signals the judge", "stops what started it"),
    *("changes the judge's priority", "changes the judge's CPUs"),
    *("maps a file of base for writing", "punches a hole into a file of base"),
    *("sets an attribute of base", "sets a time of base", "exchanges a file of base"),
    *("leaves a hook in base's repository", "changes base's git configuration"),
    *("reads a name in the machine's shared memory", "locks the judge's cache"),
    *("replaces a name in the machine's shared memory", "makes files without end"),
)
