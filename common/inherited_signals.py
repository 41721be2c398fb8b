"""The signal state that a process inherits from the one that started it.

A blocked or ignored signal stays so in every process started from here. A host that blocks SIGPROF
or ignores SIGCHLD would thus disable the time limits of child processes, and hide how they ended.
"""

from __future__ import annotations

import signal

_NEEDED = (signal.SIGCHLD, signal.SIGPROF, signal.SIGXCPU)
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGIO)
_STOPPING = (signal.SIGTTIN, signal.SIGTTOU)


def accept_interrupts() -> None:
    """Let SIGINT end the process silently, also one that arrived while it was blocked.

    `common.launch` blocks it. A process that ignores SIGINT goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


def reset() -> None:
    """Unblock all signals, and restore the defaults of those that end or report child processes.

    Ignore signals that would end the process and that it does not use, and those that would stop it
    if a library asks the user for something at the terminal.
    """
    for number in _NEEDED:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in _IGNORED + _STOPPING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    accept_interrupts()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
