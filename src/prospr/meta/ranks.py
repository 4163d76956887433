"""Many processes that score one model together: each evaluates its part of every batch, sums go over all.

Tensors go over a process group of our own, made for one call: what goes wrong in it leaves the user's groups as they
were. Words (who is here, what failed, signs of life) go through the store the processes met at. So a rank that died, or
one that raised an error, is known to the others in seconds, and no wait is endless.
"""

import contextlib
import ctypes
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prospr.errors import BatchError, RankError, SettingError, WaitingWarning
from prospr.meta.batches import map_tensors, samples

__all__ = ["Ranks", "Team", "fingerprints", "joined", "together"]

BUCKET = 2**24  # numbers sent at once
LOOK_EVERY = 1.0  # seconds between two looks at the others while waiting
NOTICE_AFTER = 15.0  # seconds of waiting for a rank to come, until that is said

_meetings: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()  # of each group: how many there were


@dataclass(frozen=True)
class Ranks:
    """The processes of an initialised torch.distributed that score together, each with its part of every batch.

    group: a process group; the default one where it is None.
    weight: of a rank's part of a batch, as a function of it: what the loss is a mean over. By default the number of
        samples, which is the first dimension of the first tensor. For a mean over tokens, their number.
    timeout: seconds that ranks wait for one another, though all are alive; longer is an error that says for whom.
    silence: seconds without a sign of life after which a rank counts as dead.

    The weights must be equal on all ranks (that is checked), and the batches each rank's own; `part` cuts them.

    >>> import torch, prospr
    >>> ranks = prospr.Ranks(weight=lambda batch: int(batch["counts"].sum()), timeout=60)
    >>> ranks.weight({"counts": torch.tensor([True, False, True])})
    2
    """

    group: Any = None
    weight: Callable[[Any], float] = samples
    timeout: float = 300.0
    silence: float = 20.0

    def __post_init__(self) -> None:
        for name in ("timeout", "silence"):
            if not getattr(self, name) > 0:
                raise SettingError(f"Ranks({name}={getattr(self, name)!r}): use a number of seconds above 0")

    def process_group(self) -> Any:
        if not (dist.is_available() and dist.is_initialized()):
            raise SettingError(
                "Ranks needs processes that know each other: call torch.distributed.init_process_group first, or "
                "pass ranks=None to work in this process alone"
            )
        return dist.group.WORLD if self.group is None else self.group

    def part(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Of batches that are the same on all ranks, this rank's part: each is cut along its first dimension."""
        group = self.process_group()
        return _Parts(batches, dist.get_rank(group), dist.get_world_size(group))


@dataclass(frozen=True)
class _Parts:
    batches: Iterable[Any]
    rank: int
    size: int

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            whole = dict(batch) if isinstance(batch, Mapping) else batch
            yield map_tensors(whole, lambda t: t.tensor_split(self.size)[self.rank] if t.dim() > 0 else t)


def together() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def joined(ranks: Ranks | None, what: str, device: torch.device, facts: Mapping[str, Any]) -> Generator["Team | None"]:
    """A team of all ranks for the time of the block; None where this process works alone.

    facts: what must be the same on all ranks, by name.
    """
    if ranks is None or dist.get_world_size(ranks.process_group()) == 1:
        yield None
        return
    team = Team(ranks, what, device, facts)
    try:
        yield team
        team.leave()
    except BaseException as error:
        team.fail(error)
        raise


class Team:
    """The ranks during one call. Every method is called by all of them, in the same order."""

    def __init__(self, ranks: Ranks, what: str, device: torch.device, facts: Mapping[str, Any]) -> None:
        group = ranks.process_group()
        self.settings = ranks
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise SettingError(f"{what}: this process is not in the group; pass ranks=None, or call it in the group")
        self.names = dist.get_process_group_ranks(group)  # in the world
        self.device = device
        # A connection of its own: another thread may be waiting in the group's.
        self._store = dist.PrefixStore(f"prospr/{_meetings.get(group, 0)}", group.get_group_store().clone())
        self._gathered = 0
        self._heard: dict[int, bytes] = {}
        self._silent = dict.fromkeys(range(self.size), 0.0)
        self._looked = time.monotonic()
        self._backend: Any = None
        self._nccl = device.type == "cuda" and "nccl" in dist.get_backend(group)
        self._set(f"beat/{self.rank}", b"0")
        self._pulse = _Pulse(self._store, self.rank, min(1.0, ranks.silence / 10))
        try:
            said = self._meet(what, facts)
            _meetings[group] = _meetings.get(group, 0) + 1
            self._compare(what, said)
            self._connect()
        except BaseException as error:
            self.fail(error)
            raise

    # ------------------------------------------------------------------------------------------------- words

    def gather(self, value: Any) -> list[Any]:
        """What each rank says: small things that can be pickled."""
        self._gathered += 1
        self._set(f"{self._gathered}/{self.rank}", pickle.dumps(value))
        self._all_at(f"{self._gathered}/count")
        keys = [f"{self._gathered}/{r}" for r in range(self.size)]
        said = [pickle.loads(raw) for raw in self._ask(lambda store: store.multi_get(keys))]
        if self._gathered > 1:  # all have read what was said before this
            self._ask(lambda store: store.delete_key(f"{self._gathered - 1}/{self.rank}"))
        return said

    def first(self, value: Any) -> Any:
        """The first rank's value that is not None."""
        return next((said for said in self.gather(value) if said is not None), None)

    def agree(self, what: str, value: Any, remedy: str) -> None:
        """Raise where the ranks say different things, and which of them do."""
        said = self.gather(value)
        if any(other != said[0] for other in said):
            raise RankError(f"{what} differ between ranks: {self._sides(said)}. {remedy}")

    def _sides(self, said: Sequence[Any]) -> str:
        sides: dict[str, list[int]] = {}
        for name, value in zip(self.names, said, strict=True):
            sides.setdefault(str(value), []).append(name)
        return "; ".join(f"{_ranks(names)}: {value}" for value, names in sides.items())

    def _meet(self, what: str, facts: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Wait until all ranks are here; what each of them says."""
        self._ask(lambda store: store.delete_key(f"failed/{self.rank}"))  # of a meeting that others did not come to
        self._set(f"here/{self.rank}", pickle.dumps((what, dict(facts))))
        began, said = time.monotonic(), False
        while not self._ask(lambda store: store.check([f"here/{r}" for r in range(self.size)])):
            waited = time.monotonic() - began
            if waited > min(NOTICE_AFTER, self.settings.timeout):
                absent = [r for r in range(self.size) if not self._ask(lambda s, r=r: s.check([f"here/{r}"]))]
                if not absent:
                    break
                who = _ranks([self.names[r] for r in absent])
                remedy = "It must be called on every rank of the group; ranks=None works in this process alone"
                if waited > self.settings.timeout:
                    self._ask(lambda store: store.delete_key(f"here/{self.rank}"))
                    raise RankError(f"{who} did not come to {what} in {self.settings.timeout:g} s. {remedy}")
                if not said:
                    warnings.warn(f"{what} waits for {who}. {remedy}", WaitingWarning, stacklevel=6)
                    said = True
            time.sleep(0.002 if waited < 1 else 0.05)
        raw = self._ask(lambda store: store.multi_get([f"here/{r}" for r in range(self.size)]))
        return [pickle.loads(one) for one in raw]

    def _compare(self, what: str, here: list[tuple[str, dict[str, Any]]]) -> None:
        if any(name != what for name, _ in here):
            raise RankError(f"the ranks are not at the same place: {self._sides([name for name, _ in here])}")
        for key in {key: None for _, one in here for key in one}:
            values = [one.get(key, "not there") for _, one in here]
            if any(value != values[0] for value in values):
                raise RankError(
                    f"{key} differs between ranks: {self._sides(values)}. All ranks must have the same settings and "
                    "the same weights: draw them from one seed, load one file, or broadcast them (as "
                    "DistributedDataParallel does)"
                )

    # ----------------------------------------------------------------------------------------------- tensors

    def sum(self, t: Tensor) -> Tensor:
        """The sum over all ranks, in a new tensor."""
        sent = t.detach().to(self.device if self._nccl else t.device, copy=True).contiguous()
        self._send(sent)
        return sent.to(t.device)

    def mean(self, params: list[Tensor], weight: float, tag: int, factor: float | None = None) -> list[Tensor]:
        """Each times its rank's factor (by default the weight), summed over all ranks, over the sum of the weights.

        params: the list is emptied on the way, so that what is sent need not be held twice.
        tag: what this is. It goes with the numbers: ranks that are not at the same place find out.
        """
        out: list[Tensor] = []
        total: float | None = None
        params.reverse()
        while params:
            bucket = _bucket(params)
            dtype = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([t.reshape(-1).to(self.device, dtype) for t in bucket])
            flat *= weight if factor is None else factor
            if total is None:
                flat = torch.cat([torch.tensor([weight, tag], dtype=dtype, device=self.device), flat])
            self._send(flat)
            if total is None:
                total, tags = flat[:2].tolist()
                if tags != tag * self.size:
                    raise RankError(
                        "the ranks are not at the same step: do all have the same number of batches? "
                        "(or pass steps=, which reads so many)"
                    )
                if total == 0:
                    raise BatchError("a batch is empty on every rank; leave it out")
                flat = flat[2:]
            flat /= total
            for t, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                out.append(torch.empty_like(t).copy_(piece.view(t.shape)))
        return out

    def share(self, named: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
        """The first rank's tensors, bit for bit, on all; None where it has None. What others pass is not looked at."""
        said = None
        if self.rank == 0:
            said = named is not None, {n: (t.shape, t.dtype) for n, t in (named or {}).items()}
        there, forms = self.first(said)
        if not there:
            return None
        found = {}
        for name, (shape, dtype) in forms.items():
            place = self.device if self._nccl else torch.device("cpu")
            t = torch.zeros(shape, dtype=dtype, device=place)
            if self.rank == 0 and named is not None:
                t.copy_(named[name])
            self._send(t.view(-1).view(torch.uint8))  # zeros of the other ranks change no bit
            found[name] = t.to(self.device)
        return found

    def sums(self, params: Sequence[Tensor], tag: int) -> list[Tensor]:
        """The sums over all ranks."""
        return self.mean(list(params), float(self.rank == 0), tag, factor=1.0)

    def _send(self, t: Tensor) -> None:
        """Sum over all ranks in place."""
        try:
            work = self._backend.allreduce([t])
        except RuntimeError as error:
            raise self._lost() from error
        if self._nccl:  # its own wait would hold up the stream, not us, and die with the process after ten minutes
            self._until(work.is_completed)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost() from error
            return
        began = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_EVERY))
                return
            except RuntimeError as error:
                if work.is_completed() and "timed out" not in str(error).lower():
                    raise self._lost() from error
            self._look()
            self._check_time(began)

    def _connect(self) -> None:
        store = dist.PrefixStore("tensors", self._store)
        limit = timedelta(seconds=4 * self.settings.timeout)  # ours comes first
        try:
            if self._nccl:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            else:
                self._backend = dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        except RuntimeError as error:
            raise self._lost() from error

    # ------------------------------------------------------------------------------------------- signs of life

    def leave(self) -> None:
        """The end, when all went well."""
        self._all_at("done")  # a connection that is closed while the other end still reads is an error there
        if self.rank == 0:  # it may hold the store, and then must not be gone while others read in it
            self._all_at("left")
        else:
            self._ask(lambda store: store.add("left", 1))
        self._pulse.stop()
        if self._nccl:
            self._backend.shutdown()

    def fail(self, error: BaseException) -> None:
        """The end, when something went wrong here: tell the others."""
        with contextlib.suppress(RankError):
            # What is known of another rank is passed on as it is.
            here = f"rank {self.names[self.rank]} failed: {type(error).__name__}: {error}"
            self._set(f"failed/{self.rank}", (str(error) if isinstance(error, RankError) else here).encode())
            self._ask(lambda store: store.add("failures", 1))
        self._pulse.stop()
        if self._backend is not None:
            if self._nccl:
                self._backend.abort()
            else:  # a sum that is under way cannot be called off, and its end would wait for it, also that of Python
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))

    def _until(self, done: Callable[[], bool]) -> None:
        began = time.monotonic()
        pause = 2e-5
        while not done():
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
            try:
                self._look()
            except RankError:
                if done():  # all came here, and one failed after that: for a reason that this rank may be about to find
                    return
                raise
            self._check_time(began)

    def _check_time(self, began: float) -> None:
        if time.monotonic() - began > self.settings.timeout:
            raise RankError(
                f"waited {self.settings.timeout:g} s for the other ranks, which are alive; is one much slower, or at "
                "another place? prospr.Ranks(timeout=...) waits longer"
            )

    def _look(self) -> None:
        """Raise where a rank has failed or died. Does nothing where it looked a moment ago."""
        now = time.monotonic()
        since = now - self._looked
        if since < LOOK_EVERY:
            return
        self._looked = now
        self._read_notes()
        beats = self._beats()
        for r, beat in beats.items():
            # Time in which this process itself was stopped does not count.
            self._silent[r] = self._silent[r] + min(since, 2 * LOOK_EVERY) if self._heard.get(r) == beat else 0.0
        self._heard = beats
        dead = [self.names[r] for r in beats if self._silent[r] > self.settings.silence]
        if dead:
            raise RankError(
                f"{_ranks(dead)} gave no sign of life for {self.settings.silence:g} s: dead, or stopped. See what it "
                "wrote last; a process killed for memory writes nothing"
            )

    def _others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def _all_at(self, place: str) -> None:
        """Wait until every rank has come here."""
        self._ask(lambda store: store.add(place, 1))
        self._until(lambda: self._ask(lambda store: store.add(place, 0)) >= self.size)

    def _read_notes(self) -> None:
        if not self._ask(lambda store: store.add("failures", 0)):
            return
        for r in self._others():
            if self._ask(lambda store, r=r: store.check([f"failed/{r}"])):
                raise RankError(self._ask(lambda store, r=r: store.get(f"failed/{r}")).decode(errors="replace"))

    def _beats(self) -> dict[int, bytes]:
        others = self._others()
        beats = self._ask(lambda store: store.multi_get([f"beat/{r}" for r in others]))
        return dict(zip(others, beats, strict=True))

    def _lost(self) -> RankError:
        """A connection broke: find out whose."""
        try:
            before = self._beats()
            end = time.monotonic() + 4 * self._pulse.every
            while time.monotonic() < end:
                self._read_notes()
                time.sleep(0.1)
            silent = [self.names[r] for r, beat in self._beats().items() if before[r] == beat]
        except RankError as known:
            return known
        who = _ranks(silent) if silent else "a rank"
        return RankError(
            f"{who} is gone: the connection broke and there was no sign of life after. See what it wrote last; a "
            "process killed for memory writes nothing"
        )

    def _set(self, key: str, value: bytes) -> None:
        self._ask(lambda store: store.set(key, value))

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._store)
        except RuntimeError as error:
            raise RankError(
                "the store that the ranks met at does not answer: the process that holds it (as a rule rank 0, or "
                f"torchrun) is gone ({error})"
            ) from error


class _Pulse:
    """A thread that says, again and again, that this process is alive."""

    def __init__(self, store: Any, rank: int, every: float) -> None:
        self.every = every
        self._store, self._key = store, f"beat/{rank}"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prospr-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        count = 0
        while not self._end.wait(self.every):
            count += 1
            try:
                self._store.set(self._key, str(count).encode())
            except RuntimeError:  # the store is gone; whoever waits will be told
                return

    def stop(self) -> None:
        self._end.set()
        self._thread.join(5)


def fingerprints(named: Mapping[str, Tensor]) -> dict[str, str]:
    """A number of the bits of each tensor, in order: equal tensors have equal ones. Computed where the tensor is."""
    sums = {name: _fingerprint(t) for name, t in named.items()}
    places: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        places.setdefault(value.device, []).append(name)
    numbers = {}
    for names in places.values():
        numbers.update(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return {name: f"{tuple(t.shape)} {numbers[name] % 2**64:016x}" for name, t in named.items()}


def _fingerprint(t: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach()).reshape(-1)
    bits = flat.view(kinds[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, bits.numel(), BUCKET):
        piece = bits[start : start + BUCKET].to(torch.int64)
        place = torch.arange(start, start + piece.numel(), device=t.device)
        mixed = (piece + 0x5851F42D) * (2 * place + 1) * 0x2545F4914F6CDD1D
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def _bucket(params: list[Tensor]) -> list[Tensor]:
    """Taken from the end of the list: numbers of one kind, and not too many."""
    bucket = [params.pop()]
    size = bucket[0].numel()
    while params and params[-1].dtype == bucket[0].dtype and size + params[-1].numel() <= BUCKET:
        bucket.append(params.pop())
        size += bucket[-1].numel()
    return bucket


def _ranks(names: Sequence[int]) -> str:
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(map(str, names))
