"""Ray in this process: starts it, watches the actors, shuts it down."""

import concurrent.futures
import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import ray
from ray.exceptions import RayError

from .._base.tracebacks import logger
from ..futures._future import Future
from ._link import ActorLink, reason

NAMESPACE = "aiopar"
_ANSWERS_WITHIN = 5.0  # seconds, then a warning says that Ray is not joined yet
_PERIOD = 0.8  # seconds between two pings of an actor
_MISSES = 3  # an actor that has not answered a ping for so many periods is lost
_PATIENCE = 25  # the same while it loads a value; a warning says that one has not started yet


@dataclass
class _Pulse:
    """Whether an actor answers."""

    ping: concurrent.futures.Future[bool] | None = None  # the latest one
    misses: int = 0  # the periods since the actor should have started, or answered


class Session(threading.Thread):
    """Ray in this process, while executors use it: starts it, watches actors, shuts it down.

    All this is done on one thread: the kernel ends the processes of a local Ray when the thread
    that has started them ends.
    """

    def __init__(self, address: str | None) -> None:
        super().__init__(name="aiopar-ray", daemon=True)
        self.ready: Future[None] = Future()
        self.users = 0  # how many executors use Ray; guarded by `_current_lock`
        self._address = address
        self._stopping = threading.Event()
        self._links: dict[ActorLink, _Pulse] = {}
        self._down: dict[str, int] = {}
        """The nodes that have lost an actor; and for how many more periods each is suspect."""
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            started = self._start_ray()
        except BaseException as error:  # noqa: BLE001  # the calls raise it
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        while not self._stopping.wait(_PERIOD):
            self._check_all()
        if started:
            ray.shutdown()

    def _start_ray(self) -> bool:
        if ray.is_initialized():
            logger.info("Ray: the program has joined %s", _cluster())
            return False
        # Of a Ray that is started here. Ray's default is 15: beside busy processes an actor would
        # get 3 % of a core, would start late, and would miss pings.
        os.environ.setdefault("RAY_worker_niceness", "0")
        with _sigterm_kept(), _warned_if_slow(self._address):
            self._await_cluster()
            context: Any = ray.init(
                self._address,
                namespace=NAMESPACE,
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
        started = _started_here(context.address_info["session_dir"])
        logger.info("Ray: started %s" if started else "Ray: joined %s", _cluster())
        return True

    def _await_cluster(self) -> None:
        """Wait until somebody listens at the address: a program that ends in `ray.init` aborts."""
        host, _, port = (cluster_address(self._address) or "").rpartition(":")
        while host and port.isdecimal():  # else a URL, or a word such as "local"
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_PERIOD).close()
                return
            except OSError:
                if self._stopping.wait(_PERIOD):
                    raise

    def ready_for(self, address: str | None) -> Future[None]:
        """As `ready`, for one executor; fails if the executor's `address` is another cluster's."""

        def check(ready: Future[None]) -> None:
            ready.result()
            check_joined(address)

        return self.ready.then(check)

    @property
    def failed(self) -> bool:
        """Whether Ray could not be started."""
        return self.ready.done() and self.ready.exception() is not None

    def stop(self) -> None:
        """Have this thread shut Ray down; waits for that, unless Ray is still being started."""
        self._stopping.set()
        if self.ready.done():  # else the cluster may never answer
            self.join()

    def watch(self, link: ActorLink) -> None:
        """Ping an actor until it is lost or closed."""
        with self._lock:
            self._links[link] = _Pulse()

    def suspect(self, node: str) -> None:
        """Note that an actor on a node was lost."""
        with self._lock:
            # Two periods: another actor of the node may have answered just before the node failed.
            self._down[node] = 2

    def _check_all(self) -> None:
        with self._lock:
            self._links = {link: pulse for link, pulse in self._links.items() if not link.is_lost}
            links = [*self._links.items()]
            down = [*self._down]
            self._down = {node: count - 1 for node, count in self._down.items() if count > 1}
        for link, pulse in links:
            _check(link, pulse, _patience(link, suspect=link.node in down))


def _patience(link: ActorLink, *, suspect: bool) -> int:
    """For how many periods an actor may leave a ping without an answer."""
    # If a node ends, Ray notices the loss of its actors one after the other. So an actor has less
    # time to answer if another actor of its node was lost.
    if link.is_loading:
        return _MISSES if suspect else _PATIENCE
    return 1 if suspect else _MISSES


def _cluster() -> str:
    return f"the cluster at {ray.get_runtime_context().gcs_address}"


def check_joined(address: str | None) -> None:
    """Check that `address` means the cluster that this process has joined.

    Raises:
        RuntimeError: It means another cluster. A process can join one only.
    """
    context = ray.get_runtime_context()
    if address is None or address in ("auto", context.gcs_address):
        return
    if address == "local":
        same = _started_here(context.get_session_name())
    else:
        same = not _endpoints(address).isdisjoint(_endpoints(context.gcs_address))
    if not same:
        raise RuntimeError(
            f"address={address!r}, but this process has joined {_cluster()}, and can join only one"
        )


def _started_here(session: str) -> bool:
    # The name of a session of Ray ends with the id of the process that has started it.
    return session.endswith(f"_{os.getpid()}")


def _endpoints(address: str) -> set[tuple[str, str]]:
    """The IP addresses of a `"host:port"`, each with the port."""
    host, _, port = address.rpartition(":")
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:  # there is no such host
        return set()
    if any(ip_address(one).is_loopback for one in found):
        # Ray calls this machine so.
        found.add(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # of Ray
    return {(one, port) for one in found}


def cluster_address(address: str | None) -> str | None:
    """The address that Ray will use; None: Ray looks for a cluster of this machine."""
    return os.environ.get("RAY_ADDRESS") if address in (None, "auto") else address


@contextmanager
def _warned_if_slow(address: str | None) -> Iterator[None]:
    """Warn if Ray is not joined soon: `ray.init` waits for a cluster without a limit."""
    given = cluster_address(address)
    if given == "local":  # it takes seconds to start one
        yield
        return
    what = f"the cluster at {given}" if given else "a cluster of this machine"
    if not given and not address:
        what += ", nor started one,"
    words = "Ray: not joined %s within %g s; it still tries"
    timer = threading.Timer(_ANSWERS_WITHIN, logger.warning, (words, what, _ANSWERS_WITHIN))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check(link: ActorLink, pulse: _Pulse, misses: int) -> None:
    """Ping an actor, or count that it has not answered; after `misses` it is lost."""
    if not ray.is_initialized():  # Ray would initialise itself again
        link.lose("has ended: the program has shut Ray down")
    elif link.info is None:
        pulse.misses += 1
        if pulse.misses == _PATIENCE:
            options = {name: value for name, value in link.options.items() if value}
            words = "worker %s has not started within %g s: Ray has no room for %s, or is slow"
            logger.warning(words, link.name, _PATIENCE * _PERIOD, options)
    elif pulse.ping is not None and not pulse.ping.done():
        pulse.misses += 1
        if pulse.misses >= misses:
            link.lose("does not answer")
    else:
        pulse.misses = 0
        try:
            if pulse.ping is None or pulse.ping.result():
                pulse.ping = link.ping()
            else:
                link.lose("has forgotten this process, which did not ping it")
        except RayError as error:
            link.lose(reason(error))


_current: Session | None = None
_current_lock = threading.Lock()


def enter_session(address: str | None) -> Session:
    """Return the session for one more executor; start it if there is none."""
    global _current  # noqa: PLW0603
    with _current_lock:
        if _current is None or _current.failed:
            _current = Session(address)
            _current.start()
        _current.users += 1
        return _current


def leave_session(session: Session) -> None:
    global _current  # noqa: PLW0603
    with _current_lock:
        session.users -= 1
        if not session.users:
            session.stop()
            if _current is session:
                _current = None


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Have the program's handler of SIGTERM in place after `ray.init`.

    Ray's core sets a handler of its own, below Python. That handler aborts the process after 3
    seconds.
    """
    handler, action = signal.getsignal(signal.SIGTERM), _signal_action(signal.SIGTERM)
    try:
        yield
    finally:
        placed = _signal_action(signal.SIGTERM)
        # Ray's core sets the same handler for SIGTRAP, and nobody else does.
        if placed != action and placed[:8] == _signal_action(signal.SIGTRAP)[:8]:
            if signal.getsignal(signal.SIGTERM) is not handler:  # set meanwhile, through Python
                action = _signal_action(signal.SIGINT)
            _signal_action(signal.SIGTERM, action)


def _signal_action(number: int, action: bytes | None = None) -> bytes:
    """The C library's `struct sigaction` of a signal, before `action` is set; on any thread."""
    before = ctypes.create_string_buffer(256)  # larger than the structure
    ctypes.CDLL(None).sigaction(int(number), action, before)
    return before.raw
