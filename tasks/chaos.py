"""A training run under faults: a monkey that injects them, and an operator that runs the flow again after each end."""

import hashlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.chaos import damage
from infra.chaos.disk import SmallDisk
from infra.chaos.plan import DAMAGES, DISK_KINDS, S3_KINDS, Injection, Kind
from infra.chaos.s3_proxy import Fault as S3Fault
from infra.chaos.s3_proxy import S3Proxy
from infra.chaos.victims import kill, kill_all
from infra.local import LocalProvider
from infra.storage import Storage, open_storage
from model.checkpoint_marker import MARKER, Marker
from tasks.chaos_flow import FlowAttempts
from tasks.chaos_watch import Progress, RankLog
from tasks.preflight import complete_steps

TICK_SECONDS = 0.1
PATIENCE_SECONDS = 300.0
"""Longest time without any sign of life, in which every fault must have been noticed and recovered from."""
PAUSE_SECONDS = (1.0, 4.0)
DISK_SECONDS = 20.0
S3_SECONDS = (3.0, 15.0)
_S3_FAULTS: dict[Kind, S3Fault] = dict(zip(S3_KINDS, ("errors", "resets", "stalls", "slow"), strict=True))
_DAMAGE = dict(zip(DAMAGES, (damage.flip, damage.truncate, damage.delete), strict=True))


class ChaosFailure(Exception):
    """The disturbed run did what no fault excuses."""


@dataclass
class Fault:
    """What was injected, and what was seen until the next."""

    kind: Kind
    step: int
    what: str
    restarts: int = 0  # of the job, by the launcher
    flow_runs: int = 0  # of the command, again
    lost_steps: int = 0
    skipped: int = 0  # checkpoints, on resuming
    failed_saves: int = 0


@dataclass
class _Lasting:
    """A fault that stays until `until`, or until it has had its effect."""

    until: float
    lift: Callable[[], None]
    served: Callable[[], bool] = lambda: False


class DisturbedRun:
    """One run, from its start to its end, under the faults of a plan.

    Args:
        flow: not started yet.
        run_uri: where the run lives, reached without the proxy.
        disk: that the run's checkpoints or scratch are on.
        proxy: between the run and S3, if that is where it lives.
        seconds: after which every kind that has come is left out.
        say: told what happens, a line at a time.
    """

    def __init__(
        self,
        flow: FlowAttempts,
        run_uri: str,
        disk: SmallDisk,
        proxy: S3Proxy | None,
        plan: list[Injection],
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.faults: list[Fault] = []
        self._flow, self._run_uri, self._disk, self._proxy = flow, run_uri, disk, proxy
        self._storage: Storage = open_storage(run_uri)
        self._plan = list(plan)
        self._seconds = seconds
        self._say = say
        self._progress = Progress(self._storage, flow.state_dir)
        self._log = RankLog(flow.state_dir)
        self._lasting: _Lasting | None = None
        self._known_step = 0
        self._resumed = True  # not at step 0
        self._attempt_faults = 0
        self._ready: float | None = None  # since when the next fault could come
        self._last = time.monotonic()

    @property
    def missing(self) -> list[Kind]:
        """The kinds that were planned and have not come."""
        return sorted({injection.kind for injection in self._plan} - {fault.kind for fault in self.faults})

    def run(self) -> None:
        """Returns when the run has ended well.

        Raises:
            ChaosFailure: it ended badly, or stood still, without a fault that explains it.
        """
        started = time.monotonic()
        try:
            self._flow.start()
            while (code := self._flow.poll()) != 0:
                if code is not None:
                    self._run_again()
                self._look()
                self._lift_when_over()
                if time.monotonic() - started > self._seconds:
                    self._leave_out_what_has_come()
                if self._plan and self._lasting is None and self._due(self._plan[0]):
                    self._inject(self._plan[0])
                if time.monotonic() - max(self._progress.changed, self._last) > PATIENCE_SECONDS:
                    raise ChaosFailure(f"no sign of life for {PATIENCE_SECONDS:.0f} s after {self._last_fault()}")
                time.sleep(TICK_SECONDS)
            self._look()
        finally:
            self._end()

    def _end(self) -> None:
        """Nothing that was started is left running, and what it logged is kept."""
        self._flow.end()
        self._lift()
        end_clusters(self._flow.state_dir)
        self._flow.keep_logs()

    def _last_fault(self) -> str:
        return f"{self.faults[-1].kind} ({self.faults[-1].what})" if self.faults else "the start"

    def _run_again(self) -> None:
        """As an operator would, who has first put right what was wrong with the machine."""
        words = self._flow.last_words()
        if not self._attempt_faults:
            raise ChaosFailure(f"attempt {self._flow.number} ended though nothing was injected in it: {words}")
        self._lift()
        self._look()
        self._flow.keep_logs()
        for fault in self.faults[-1:]:  # ranks can also die for a damage that then was not done
            fault.flow_runs += 1
        self._progress.forget()
        self._attempt_faults = 0
        self._last = time.monotonic()
        self._say(f"     the flow ended ({words}); it is run again")
        self._flow.start()

    def _look(self) -> None:
        self._progress.look()
        for what, number in self._log.news():
            if not self.faults:
                if what != "launched" or number > 0:
                    raise ChaosFailure(f"{what} ({number}) before anything was injected")
                continue
            fault = self.faults[-1]
            if what == "launched":
                fault.restarts += number > 0
                self._resumed, self._progress.step = False, None
            elif what == "resumed":
                fault.lost_steps += max(0, self._known_step - number)
                self._known_step, self._resumed = number, True
                self._say(f"     resumed at step {number:,}")
            elif what == "skipped":
                fault.skipped += 1
            else:
                fault.failed_saves += 1
        if self._progress.step is not None and not self._resumed:
            raise ChaosFailure(f"the run began again at step 0 after {self._last_fault()}")

    def _leave_out_what_has_come(self) -> None:
        come = {fault.kind for fault in self.faults}
        self._plan = [injection for injection in self._plan if injection.kind not in come]

    def _due(self, injection: Injection) -> bool:
        now, step = time.monotonic(), self._progress.step
        if injection.at_step is None:
            return now >= self._last + injection.delay_seconds
        if step is None or step < injection.at_step:
            self._ready = None
            return False
        self._ready = self._ready or now
        return now >= self._ready + injection.delay_seconds

    def _inject(self, injection: Injection) -> None:
        """Inject the fault, unless there is nothing that it could hit now; it then stays the next."""
        newest = self._known_step if self._progress.step is None else self._progress.newest_step()
        chance = random.Random(injection.seed)
        if (what := self._hit(injection.kind, chance)) is None:
            return
        self._known_step = newest
        self.faults.append(Fault(injection.kind, newest, what))
        self._plan.pop(0)
        self._attempt_faults += 1
        self._ready, self._last = None, time.monotonic()
        self._say(f"{len(self.faults):3}  step {newest:>6,}  {injection.kind:<10}  {what}")

    def _hit(self, kind: Kind, chance: random.Random) -> str | None:
        """What was hit; None where there is nothing to hit."""
        if kind in _DAMAGE:
            return self._damage(kind, chance)
        if kind in DISK_KINDS:
            return self._fill_disk(kind)
        if kind in _S3_FAULTS:
            return self._disturb_s3(kind, chance)
        return self._signal(kind, chance)

    def _signal(self, kind: Kind, chance: random.Random) -> str | None:
        victims = self._progress.victims()
        roles = {Kind.RANK: "rank", Kind.PAUSE: "rank", Kind.STUCK: "rank", Kind.TORCHRUN: "torchrun"}
        fitting = [victim for victim in victims if victim.role == roles.get(kind, "supervisor")]
        if not fitting:
            return None
        victim = chance.choice(fitting)
        what = f"{victim.role} {victim.process.pid} of {victim.node}"
        if kind == Kind.PAUSE:
            seconds = chance.uniform(*PAUSE_SECONDS)
            victim.send(signal.SIGSTOP)
            self._lasting = _Lasting(time.monotonic() + seconds, lambda: victim.send(signal.SIGCONT))
            return f"{what} for {seconds:.1f} s"
        self._progress.forget()
        if kind == Kind.STUCK:
            victim.send(signal.SIGSTOP)
        elif kind == Kind.NOTICE:
            victim.send(signal.SIGTERM)
        elif kind == Kind.CANCEL:
            self._flow.send(signal.SIGTERM)
            return "the flow"
        elif kind == Kind.NODE:
            kill(other for other in victims if other.node == victim.node)
            return victim.node
        elif kind in (Kind.FLOW, Kind.POWER):
            self._flow.end()
            if kind == Kind.POWER:
                kill_all(self._flow.state_dir)
            return "the flow" if kind == Kind.FLOW else "everything"
        else:
            victim.send(signal.SIGKILL)
        return what

    def _damage(self, kind: Kind, chance: random.Random) -> str | None:
        """Kill the ranks, then damage the newest checkpoint, which the next generation will want; with the flow or
        without. The one before is whole, or there would rightly be nothing to resume from."""
        if not self._has_another_whole():
            return None
        self._flow.send(signal.SIGSTOP)  # it must not launch the next generation before the damage is done
        try:
            kill_all(self._flow.state_dir)
            self._progress.forget()
            self._attempt_faults += 1
            if not self._has_another_whole():  # the ranks died in the middle of a save
                return None
            directory = f"checkpoints/step-{complete_steps(self._run_uri)[-1]:08d}"
            name = chance.choice([entry.name for entry in self._storage.list(directory)])
            what = _DAMAGE[kind](self._storage, name, chance)
            if chance.random() < 0.5:
                self._flow.end()
                what += "; the flow was killed too"
            return what.replace("checkpoints/", "")
        finally:
            self._flow.send(signal.SIGCONT)

    def _has_another_whole(self) -> bool:
        """Whether the checkpoint before the newest is there and what was saved."""
        complete = complete_steps(self._run_uri)
        if len(complete) < 2:
            return False
        directory = f"checkpoints/step-{complete[-2]:08d}"
        try:
            files = Marker.decode(self._storage.read(f"{directory}/{MARKER}"), complete[-2]).files
            return all(_sha256(self._storage, f"{directory}/{name}") == file.sha256 for name, file in files.items())
        except (FileNotFoundError, ValueError):  # retention was faster, or it was damaged before
            return False

    def _fill_disk(self, kind: Kind) -> str:
        size = sum(entry.size_bytes for entry in self._storage.list("checkpoints"))
        free_bytes = size // max(1, 2 * len(complete_steps(self._run_uri))) if kind == Kind.DISK_SHORT else 0
        self._disk.fill(free_bytes)
        saves = sum(fault.failed_saves for fault in self.faults)
        self._lasting = _Lasting(
            time.monotonic() + DISK_SECONDS,
            self._disk.free,
            lambda: sum(fault.failed_saves for fault in self.faults) > saves,
        )
        return f"{free_bytes:,} bytes left"

    def _disturb_s3(self, kind: Kind, chance: random.Random) -> str:
        assert self._proxy
        proxy, seconds = self._proxy, chance.uniform(*S3_SECONDS)
        proxy.fault = _S3_FAULTS[kind]

        def lift() -> None:
            proxy.fault = None

        self._lasting = _Lasting(time.monotonic() + seconds, lift)
        return f"for {seconds:.1f} s"

    def _lift_when_over(self) -> None:
        if self._lasting and (time.monotonic() > self._lasting.until or self._lasting.served()):
            self._lift()

    def _lift(self) -> None:
        if self._lasting:
            lasting, self._lasting = self._lasting, None
            lasting.lift()
            self._last = time.monotonic()


def end_clusters(state_dir: Path) -> None:
    """Nothing that was started there is left running."""
    provider = LocalProvider(state_dir)
    for record in provider.list_clusters():
        provider.terminate(record.cluster.name)


def copy_stages(quiet_uri: str, run_uri: str) -> None:
    """What the quiet run prepared before it trained, its configuration too."""
    quiet, run = open_storage(quiet_uri), open_storage(run_uri)
    for part in ("config.yaml", "documents", "tokenizer", "tokens", "scaling"):
        for entry in quiet.list(part):
            run.upload(quiet.local(entry.name), entry.name)


def _sha256(storage: Storage, name: str) -> str:
    return hashlib.sha256(storage.read(name)).hexdigest()
