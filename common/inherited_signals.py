"""Resets the signal state that a process inherits from its parent process.

A signal that a process blocks or ignores is blocked or ignored in its child processes too. A host
that blocks SIGPROF or ignores SIGCHLD would thus disable the time limits of our child processes,
and hide how they ended.
"""

from __future__ import annotations

import signal

_NEEDED = (signal.SIGCHLD, signal.SIGPROF, signal.SIGXCPU)
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGIO)
_STOPPING = (signal.SIGTTIN, signal.SIGTTOU)


def accept_interrupts() -> None:
    """Unblock SIGINT, which `common.launch` blocks, and let it end the process silently.

    This also applies to a SIGINT that has arrived meanwhile. A process that ignores SIGINT
    continues to ignore it.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


def reset() -> None:
    """Unblock all signals, and set which signals are ignored.

    Signals that end or report child processes get their default action. Two kinds are ignored:
    signals that would end the process and that it does not use, and signals that would stop it when
    a library reads from the terminal.
    """
    for number in _NEEDED:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in _IGNORED + _STOPPING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    accept_interrupts()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
